"""The paper's table: accuracy, and the speed of training beside standard attention, on five tasks.

    python -m experiments.lra table --help

May import the rest of `lra`, `training` and benchmarks.timing. For the command line of lra alone.
"""
