"""Long Range Arena: a transformer encoder classifier whose attention is any sparseflash mask.

    python -m experiments.lra train --mask butterfly --preset modern
    python -m experiments.lra generate --help

Imports experiments.training, the images of experiments.pathfinder and experiments.benchmarks.timing; no other folder
imports it. This file imports nothing, so that the generator's worker processes start without PyTorch.
"""
