"""The entries of the catalogue: one file for each one or two groups of patterns.

May import the library alone. For benchmarks.patterns.
"""
