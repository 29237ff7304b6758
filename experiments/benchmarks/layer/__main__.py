"""Entry point of ``python -m experiments.benchmarks.layer``."""

from experiments.benchmarks.layer.cli import app

if __name__ == "__main__":
    app(prog_name="python -m experiments.benchmarks.layer")
