"""Speed of sparseflash beside its peers: ``python -m experiments.benchmarks.speed``, see README.md here.

Its cases, patterns and checks are for benchmarks.tune and benchmarks.blocks too; imports benchmarks.timing.
"""
