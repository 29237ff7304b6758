"""Long Range Arena: a transformer encoder classifier with any sparseflash mask.

    python -m experiments.lra train --mask butterfly --preset modern
    python -m experiments.lra generate --help

This file imports nothing, so that the generator's worker processes start without PyTorch.
"""
