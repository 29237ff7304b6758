"""The registered operator of the Triton backend: checks what only this backend asks, then plans and launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

try:
    from triton.runtime.interpreter import InterpretedFunction
except ModuleNotFoundError as error:
    raise RuntimeError(
        "backend='triton' needs the package triton, which is not installed: pip install triton (Linux), or use "
        "backend='blockwise'."
    ) from error

from sparseflash.backends.registration import empty_gradient, empty_lse, empty_out, register
from sparseflash.backends.triton import launch
from sparseflash.backends.triton.alignment import is_aligned
from sparseflash.backends.triton.cuda_graphs import keep_if_recorded
from sparseflash.backends.triton.launcher import OLDEST
from sparseflash.backends.triton.portable.forward import forward_kernel
from sparseflash.backends.triton.schedule.plan import dense_plan, plan_of

# The kernels take numbers inside a tile, of 256 tokens at most, to fit in 32 bits.
_FAR = 2**31 // 256
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, indptr: Tensor | None, indices: Tensor | None, tile: Tensor | None,
    words: Tensor | None, pattern: Tensor | None, lengths: Tensor | None, block_q: int, block_k: int, scale: float,
    seed: Tensor | None = None, dropped: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check(q, k, v)
    out, lse, kept = empty_out(q, v), empty_lse(q), _empty_kept(q)
    if k.numel() == 0:
        return out.zero_(), lse.fill_(-torch.inf), kept
    if q.numel() > 0:
        problem = _problem(
            q, k, indptr, indices, tile, words, pattern, lengths, (block_q, block_k), scale, seed, dropped,
            columns=False,
        )  # fmt: skip
        q, k, v = launch.operands(problem, q, k, v)
        launch.forward(problem, q, k, v, out, lse, kept)
    return out, lse, kept


def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Tensor,
    indptr: Tensor | None, indices: Tensor | None, tile: Tensor | None, words: Tensor | None,
    pattern: Tensor | None, lengths: Tensor | None,
    block_q: int, block_k: int, scale: float, seed: Tensor | None = None, dropped: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = empty_gradient(q), empty_gradient(k), empty_gradient(v)
    if k.numel() == 0 or q.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    if dout.stride(-1) != 1 or dout.stride(2) >= _FAR:  # what a sum() sends back is one number, expanded
        dout = dout.contiguous()
    problem = _problem(
        q, k, indptr, indices, tile, words, pattern, lengths, (block_q, block_k), scale, seed, dropped, columns=True
    )
    dlse = None if dlse is None else dlse.contiguous()
    # Hooks for saved tensors may bring them back from anywhere; launches expect them aligned.
    lse, kept = (x.clone() if x.data_ptr() % 16 else x for x in (lse, kept))
    q, k, v, dout = launch.operands(problem, q, k, v, dout)
    launch.backward(problem, q, k, v, out, lse, kept, dout, dlse, dq, dk, dv)
    return dq, dk, dv


def _empty_kept(q: Tensor) -> Tensor:
    """Maxima and inverse sums of the rows, `[2, B, Hq, Nq]`, in fp32; nothing in half, where lse will do."""
    return q.new_empty((2, *q.shape[:-1]) if q.dtype == torch.float32 else (0,))


attention = register("triton", _forward, _backward, _empty_kept)


def repeated(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, mask_arrays: Sequence[Tensor | None], block: tuple[int, int],
    scale: float,
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:  # fmt: skip
    """The call that gave `out`, without its checks, for tensors of the same layout in half precision.

    `mask_arrays`: those of the operator's arguments, without lengths. Returns a function of q, k and v that returns
    `(out, lse)`.
    """
    indptr, indices, tile, words, pattern = mask_arrays
    if not all(map(is_aligned, (q, k, v))):
        return lambda q, k, v: _forward(q, k, v, indptr, indices, tile, words, pattern, None, *block, scale)[:2]
    problem = _problem(q, k, indptr, indices, tile, words, pattern, None, block, scale, None, 0, columns=False)
    run_forward = launch.bound_forward(launch.prepared_forward(problem, q, k, v, out), problem, _empty_kept(q))
    as_q = torch.empty_like(q)
    out_is_as_q = (as_q.shape, as_q.stride()) == (out.shape, out.stride())
    some_lse = q.new_empty(1, dtype=torch.float32).expand(q.shape[:-1])  # of the size of one number

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keep_if_recorded(problem.plan)
        out = torch.empty_like(q) if out_is_as_q else empty_out(q, v)
        lse = torch.empty_like(some_lse)  # contiguous; asking for a size and a dtype takes three times as long
        run_forward(q, k, v, out, lse)
        return out, lse

    return run


def _problem(
    q: Tensor, k: Tensor, indptr: Tensor | None, indices: Tensor | None, tile: Tensor | None, words: Tensor | None,
    pattern: Tensor | None, lengths: Tensor | None, block: tuple[int, int], scale: float,
    seed: Tensor | None, dropped: int, *, columns: bool,
) -> launch.Problem:  # fmt: skip
    q_heads, tokens = (q.shape[0], q.shape[1]), (q.shape[2], k.shape[2])
    if indptr is None or indices is None or tile is None or words is None or pattern is None:
        plan = dense_plan(q_heads, k.shape[1], tokens, block, q.device)
    else:
        plan = plan_of(indptr, indices, tile, words, pattern, q_heads, k.shape[1], tokens, block, columns=columns)
    keep_if_recorded(plan)
    return launch.Problem(plan, lengths, block, scale, q.dtype == torch.float32 and _tf32(), seed, dropped)


def _tf32() -> bool:
    """Whether PyTorch multiplies fp32 matrices in TF32 now."""
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # PyTorch 2.9 and later; asking the old way there may raise
        return bool(matmul.fp32_precision == "tf32")
    return bool(matmul.allow_tf32)


# TRITON_INTERPRET=1 when the kernels were imported.
_INTERPRETED = isinstance(forward_kernel, InterpretedFunction)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dtype not in _DTYPES:
        raise TypeError(
            f"the triton backend takes fp16, bf16 and fp32; got {q.dtype}. backend='blockwise' takes fp64, too."
        )
    for name, dim in (("D", q.shape[-1]), ("Dv", v.shape[-1])):
        if not 16 <= dim <= 256:
            raise ValueError(f"the triton backend takes head dims from 16 to 256; got {name} = {dim}.")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(-1) != 1:
            raise ValueError(
                f"{name} must be contiguous in its last dimension; its strides are {x.stride()}. Call .contiguous()."
            )
        if x.stride(2) >= _FAR and x.shape[2] > 1:
            raise ValueError(
                f"tokens of {name} must lie less than {_FAR:,} elements apart; its strides are {x.stride()}. Call "
                ".contiguous()."
            )
    if _INTERPRETED:
        if q.dtype == torch.bfloat16:
            raise TypeError("Triton's interpreter computes bf16 wrongly without a word; use fp16 or fp32 with it.")
        return
    if q.device.type != "cuda":
        raise RuntimeError(
            f"the triton backend runs on NVIDIA GPUs; got tensors on {q.device}. Use backend='blockwise', or set "
            "TRITON_INTERPRET=1 before the first import to run the kernel slowly in Triton's interpreter."
        )
    _check_device(q.device)


@lru_cache
def _check_device(device: torch.device) -> None:
    if torch.version.hip is not None:
        raise RuntimeError("the triton backend is not tested on AMD GPUs; use backend='blockwise'.")
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        raise RuntimeError(
            "the triton backend needs compute capability 8.0 (Ampere) or newer; "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}. Use backend='blockwise'."
        )
