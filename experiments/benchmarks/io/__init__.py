"""The cost of attention in operations, bytes and time: ``python -m experiments.benchmarks.io``, see README.md.

May import the library, `training` and `harness`. No other folder imports it.
"""
