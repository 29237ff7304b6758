"""What the compiler makes of the kernels, for any architecture, without a GPU: ``python -m
experiments.benchmarks.compile``.

May import the library, its `backends`, `dropout` and `arguments`, `harness` and `interpreter` of benchmarks, and
`atomic_files` of training. For benchmarks.tune and the tests of the kernels, too.
"""
