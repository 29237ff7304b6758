"""Long Range Arena: a transformer encoder classifier whose attention is any sparseflash mask.

    python -m experiments.lra train --mask butterfly --preset modern
    python -m experiments.lra generate --help

This package imports nothing here, so that the generator's worker processes start without PyTorch.
"""
