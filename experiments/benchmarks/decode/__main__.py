"""Entry point of ``python -m experiments.benchmarks.decode``."""

from experiments.benchmarks.decode.cli import app

app(prog_name="python -m experiments.benchmarks.decode")
