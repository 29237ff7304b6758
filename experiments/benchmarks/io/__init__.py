"""What attention costs in operations, bytes and time: ``python -m experiments.benchmarks.io``, see README.md.

Imports benchmarks.timing and experiments.training.layers; no other folder imports it.
"""
