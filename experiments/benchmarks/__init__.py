"""Measurements of the library: `python -m experiments.benchmarks NAME`, or `show FILE` for a record as a table.

A folder may import the library, `harness` and `experiments.training`, and another measurement only where its docstring
says so. Of benchmarks, other folders import `timing` alone.
"""
