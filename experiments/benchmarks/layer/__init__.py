"""A training step of one transformer layer under torch.compile, with this attention and with each peer's: how much of a
kernel's gain is left where people train?

    python -m experiments.benchmarks.layer --out runs/layer

May import `harness`, `timing`, `interpreter`, the speed benchmark (its cases, peers and inputs) and `training`.
"""
