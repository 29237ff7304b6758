"""`python -m experiments.speed`."""

from experiments.speed.cli import app

if __name__ == "__main__":
    app(prog_name="python -m experiments.speed")
