"""Whether kernels run on a device now, and properties of the GPU and of PyTorch's matrix products on it."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from sparseflash.backends.triton.architecture import architecture_of
from sparseflash.blockmask import streams
from sparseflash.blockmask.cache import bounded

INTERPRETED_AS = (9, 0)  # the interpreter uses the tiles of an H100, so that tests cover them


def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability of a device; the interpreter's for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else INTERPRETED_AS


def multiplies_in_tf32() -> bool:
    """Whether PyTorch currently multiplies fp32 matrices in TF32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


@bounded(maxsize=64)
def runs_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run on this GPU; on a CPU, whether Triton, and so its interpreter, is installed."""
    if find_spec("triton") is None:
        return False
    if device.type != "cuda":
        return True
    return torch.version.hip is None and architecture_of(torch.cuda.get_device_capability(device)).is_supported


def check_runs(q: Tensor, interpreted: bool) -> None:
    """Raises TypeError or RuntimeError unless the kernels run on q's device in q's dtype.

    interpreted: whether Triton's interpreter runs them; callers read it from `availability`, which needs Triton.
    """
    if interpreted and q.device.type != "meta":
        if q.dtype == torch.bfloat16:
            raise TypeError("Triton's interpreter silently computes bf16 wrongly; use fp16 or fp32 with it.")
        return
    if q.device.type != "cuda":
        raise RuntimeError(
            f"Triton's kernels run on NVIDIA GPUs; got tensors on {q.device}. Use backend='blockwise' (for a "
            "cache 'reference'), or set TRITON_INTERPRET=1 before the first import to run the kernel slowly in "
            "Triton's interpreter, on the CPU."
        )
    check_device(q.device)


@bounded(maxsize=64)
def check_device(device: torch.device) -> None:
    """Raises RuntimeError if the kernels cannot run on the device."""
    if torch.version.hip is not None:
        raise RuntimeError("the triton backend is not tested on AMD GPUs; use backend='blockwise'.")
    check_capability(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))


def check_capability(capability: tuple[int, int], name: str) -> None:
    """Raises RuntimeError if the kernels do not run on GPUs of this compute capability. name: of the GPU."""
    if not architecture_of(capability).is_supported:
        raise RuntimeError(
            f"the triton backend needs compute capability 8.0 (Ampere) or newer; {name} has "
            f"{capability[0]}.{capability[1]}. Use backend='blockwise'."
        )


def refuse_to_record(device: torch.device) -> None:
    """Raises RuntimeError while a CUDA graph is recorded: a plan cached now would be filled only at a replay.

    Recorded work reads the same memory at every replay; `blockmask/streams.py` keeps that memory alive.
    """
    if streams.is_capturing(device):
        raise RuntimeError(
            "attention makes the execution plan of a mask and loads its kernels at the first call, which a CUDA graph "
            "cannot record: before the capture, call it once with the same mask and tensors of the same layout, "
            "forward and, if that is recorded, backward."
        )
