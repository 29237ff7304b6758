"""Entry point of ``python -m experiments.selection``."""

from experiments.selection.cli import app

app(prog_name="python -m experiments.selection")
