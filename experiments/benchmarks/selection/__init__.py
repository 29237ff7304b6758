"""What a choice of blocks at every step costs the host and the GPU, eager and recorded, beside dense attention.

    python -m experiments.benchmarks.selection --out runs/selection-cost

It may import `timing` of the benchmarks, FlexAttention as `speed` compiles it (`flexattention`), `training` and the
library.
"""
