"""Entry point of ``python -m experiments.benchmarks.patterns``."""

if __name__ == "__main__":
    from experiments.benchmarks.patterns.cli import app

    app(prog_name="python -m experiments.benchmarks.patterns")
