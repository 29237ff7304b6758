"""Attention over several ranks: a simulation of up to 1,024 of them, and measurements on a few.

Command: ``python -m experiments.benchmarks.distributed simulate`` and ``measure``. May import `harness`, `training` and
the library.
"""
