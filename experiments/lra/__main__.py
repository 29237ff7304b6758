import os

if __name__ == "__main__":
    # Before PyTorch is loaded: threads that spin slow a run down as soon as the machine has other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

    from experiments.lra.cli import app

    app(prog_name="python -m experiments.lra")
