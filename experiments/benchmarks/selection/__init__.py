"""What a choice of blocks at every step costs the host and the GPU, eager and recorded, beside dense attention.

    python -m experiments.benchmarks.selection --out runs/selection-cost

May import `timing`, the `peers` of the speed benchmark, `training` and the library.
"""
