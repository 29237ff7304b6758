"""The entries of the catalogue: one file for each one or two groups of patterns.

For benchmarks.patterns; imports the library alone.
"""
