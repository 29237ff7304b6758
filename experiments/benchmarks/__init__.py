"""Measurements of the library: `python -m experiments.benchmarks NAME`, or `show FILE` for a record as a table.

A benchmark of one file may import the library, `harness`, `timing`, `speed/peers` and `experiments.measurements`. A
folder may import the library, `harness` and `experiments.training`, and another measurement only where its docstring
says so. Of benchmarks, other folders import `timing` alone.
"""
