"""Whether Triton compiles kernels or interprets them, which it decides when it is imported."""

from __future__ import annotations

import os

import typer


def run_kernels_on(device: str) -> None:
    """Kernels are compiled for "cuda", and interpreted for "cpu", a test of an experiment; before Triton is imported.

    Raises typer.BadParameter if there is no GPU for "cuda".
    """
    if device != "cuda":
        os.environ["TRITON_INTERPRET"] = "1"
        return
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter("there is no CUDA device; --device cpu with a small --length tests the experiment")
    compile_kernels()


def compile_kernels() -> None:
    """Kernels are compiled, whatever the environment says; before Triton is imported."""
    os.environ.pop("TRITON_INTERPRET", None)
