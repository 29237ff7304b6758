"""Decoding: milliseconds and bytes a second of a few new tokens over a long cache, beside PyTorch's own attention.

    python -m experiments.benchmarks.decode --out runs/decode

May import `timing`, `training` and the library.
"""
