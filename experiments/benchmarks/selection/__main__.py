"""Entry point of ``python -m experiments.benchmarks.selection``."""

from experiments.benchmarks.selection.cli import app

app(prog_name="python -m experiments.benchmarks.selection")
