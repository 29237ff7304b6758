"""Long Range Arena: a transformer encoder classifier whose attention is any sparseflash mask.

    python -m experiments.lra train --mask butterfly --preset modern
    python -m experiments.lra generate --help

May import the library and `training`; its tasks import the images of pathfinder. No other folder imports it. This file
imports nothing, so that the generator's worker processes start without PyTorch.
"""
