"""The pattern library as one page of pictures and one table of numbers: ``python -m experiments.benchmarks.patterns``.

May import `harness`, the library and its `arguments`, `training`, and its own `entries`. No other folder imports it.
"""
