"""Entry point of ``python -m experiments.benchmarks.decode``."""

from experiments.benchmarks.decode.cli import app

if __name__ == "__main__":
    app(prog_name="python -m experiments.benchmarks.decode")
