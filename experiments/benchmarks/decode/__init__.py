"""Decoding: milliseconds and bytes a second of a few new tokens over a long cache, beside PyTorch's own attention and
FlashInfer's.

    python -m experiments.benchmarks.decode --out runs/decode

May import `timing`, the speed benchmark (its peers and their comparison with ours), `training` and the library.
"""
