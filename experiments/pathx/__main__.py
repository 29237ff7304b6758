"""`python -m experiments.pathx`."""

from experiments.pathx.cli import app

# Worker processes import this file too.
if __name__ == "__main__":
    app()
