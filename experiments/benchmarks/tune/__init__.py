"""Finds the tile sizes that the library ships, by timing candidates: ``python -m experiments.benchmarks.tune``.

May import the library and its `backends`, `training`, `measurements`, and of benchmarks `harness`, `timing`,
`interpreter`, `speed` and `compile`.
"""
