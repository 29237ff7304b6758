import os

if __name__ == "__main__":
    # Before PyTorch is loaded; see experiments/lra/__main__.py.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

    from experiments.lm.cli import app

    app(prog_name="python -m experiments.lm")
