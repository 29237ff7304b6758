"""What the compiler makes of the kernels, for any architecture, without a GPU: ``python -m
experiments.benchmarks.compile``.

For benchmarks.tune too; imports the library alone.
"""
