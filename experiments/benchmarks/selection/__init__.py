"""What a choice of blocks at every step costs the host and the GPU, eager and recorded, beside dense attention.

    python -m experiments.benchmarks.selection --out runs/selection-cost

May import `timing`, the speed benchmark (its peers and their comparison with ours), `training` and the library.
"""
