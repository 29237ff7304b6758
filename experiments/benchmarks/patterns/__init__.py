"""The pattern library as one page of pictures and one table of numbers: `python -m experiments.benchmarks.patterns`."""
