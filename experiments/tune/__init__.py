"""Finds the tile sizes that `sparseflash/kernels/configs.py` ships: ``python -m experiments.tune``, see README.md."""
