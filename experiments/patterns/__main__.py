"""Entry point of ``python -m experiments.patterns``."""

if __name__ == "__main__":
    from experiments.patterns.cli import app

    app(prog_name="python -m experiments.patterns")
