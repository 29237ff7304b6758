"""`python -m experiments.benchmarks.speed`."""

from experiments.benchmarks.speed.cli import app

if __name__ == "__main__":
    app(prog_name="python -m experiments.benchmarks.speed")
