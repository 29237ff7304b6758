"""The layers of `sparseflash.selection`, which choose their keys at every step, trained and compared.

    python -m experiments.selection --preset cpu --out runs/selection

trains them on associative recall, beside dense attention and fixed patterns.
"""
