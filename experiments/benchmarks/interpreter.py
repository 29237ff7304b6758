"""Whether Triton compiles kernels or interprets them, which it decides when it is imported."""

from __future__ import annotations

import os

import typer


def run_kernels_on(device: str) -> None:
    """Compiles kernels for "cuda", interprets them for "cpu" (a test of an experiment). Call before importing Triton.

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
    """Compiles kernels, whatever the environment says. Call before importing Triton."""
    os.environ.pop("TRITON_INTERPRET", None)
