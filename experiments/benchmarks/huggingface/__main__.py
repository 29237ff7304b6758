"""Entry point of ``python -m experiments.benchmarks.huggingface``."""

from experiments.benchmarks.huggingface.cli import app

if __name__ == "__main__":
    app(prog_name="python -m experiments.benchmarks.huggingface")
