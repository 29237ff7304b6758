"""Measurements of the library: `python -m experiments.benchmarks NAME`, or `show FILE` for a record as a table."""
