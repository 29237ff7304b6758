"""Finds the tile sizes that the library ships, by timing candidates: ``python -m experiments.benchmarks.tune``.

For benchmarks.blocks too; imports benchmarks.timing, benchmarks.speed and benchmarks.compile.
"""
