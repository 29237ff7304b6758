"""Experiments on sparseflash, each run as ``python -m experiments.<name>``; the library imports none."""
