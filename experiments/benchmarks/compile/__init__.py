"""What the compiler makes of the kernels, for any architecture, without a GPU: ``python -m
experiments.benchmarks.compile``.

May import the library and its `backends` and `arguments`. For benchmarks.tune, too.
"""
