"""What the compiler makes of the kernels, for any architecture, without a GPU: ``python -m
experiments.benchmarks.compile``.

May import the library, its `backends`, `dropout` and `arguments`, and `interpreter` of benchmarks. For benchmarks.tune,
too.
"""
