"""The paper's table: accuracy, and the speed of training beside standard attention, on five tasks.

    python -m experiments.lra table --help

For the command alone; imports the rest of lra and experiments.benchmarks.timing.
"""
