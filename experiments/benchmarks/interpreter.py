from __future__ import annotations

import os

import typer


def run_kernels_on(device: str) -> None:
    """Compiles kernels for "cuda", interprets them for "cpu". Call before importing Triton."""
    if device != "cuda":
        os.environ["TRITON_INTERPRET"] = "1"
        return
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter("there is no CUDA device; --device cpu with a small --length tests the experiment")
    compile_kernels()


def compile_kernels() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
