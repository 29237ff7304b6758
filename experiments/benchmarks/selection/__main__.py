"""Entry point of ``python -m experiments.benchmarks.selection``."""

from experiments.benchmarks.selection.cli import app

if __name__ == "__main__":
    app(prog_name="python -m experiments.benchmarks.selection")
