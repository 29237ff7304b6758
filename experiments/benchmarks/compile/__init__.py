"""Compiles the kernels for any architecture, without a GPU, and reports their resources: ``python -m
experiments.benchmarks.compile``.

May import the library, its `backends`, `dropout` and `arguments`, `harness` and `interpreter` of benchmarks, and
`atomic_files` of training. For benchmarks.tune and the tests of the kernels, too.
"""
