"""Compiles the kernels for any architecture, without a GPU, and reports their resources: ``python -m
experiments.benchmarks.compile``.

For benchmarks.tune and the tests of the kernels, too.
"""
