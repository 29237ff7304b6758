"""The forward of attention to chosen tokens, and what the kernels refuse."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash.backends.registration import empty_kept, empty_lse, empty_out
from sparseflash.backends.triton.availability import INTERPRETED
from sparseflash.backends.triton.device import check_runs
from sparseflash.backends.triton.launcher import OPTIONS, on_device
from sparseflash.backends.triton.selected.forward import forward_kernel, scores_kernel
from sparseflash.backends.triton.selected.lists import Chosen, sort_kernel
from sparseflash.backends.triton.selected.sizes import readable, sizes_of, strides_of
from sparseflash.backends.triton.selected.tiles import MOST_DIM, MOST_DIM_OF_FP32, MOST_HEADS, power
from sparseflash.limits import check_count

MOST_CHOICES = 8192  # of a list, which one program sorts


def check(q: Tensor, k: Tensor, v_dim: int, choices: int) -> None:
    """Raises an error unless the kernels take these tensors."""
    if q.device.type != "cuda" and not (INTERPRETED and q.device.type == "cpu"):
        raise RuntimeError(
            f"the kernels for chosen tokens run on NVIDIA GPUs; got tensors on {q.device}. Use backend='reference'."
        )
    check_runs(q, INTERPRETED)
    if q.dtype == torch.float64:
        raise TypeError("the triton backend takes fp16, bf16 and fp32; got fp64. Use backend='reference'.")
    group = q.shape[1] // k.shape[1]
    if group > MOST_HEADS:
        raise ValueError(f"groups must be of at most {MOST_HEADS} query heads for the triton backend; got {group}.")
    most = MOST_DIM if q.dtype.itemsize == 2 else MOST_DIM_OF_FP32
    if max(q.shape[3], v_dim) > most:
        raise ValueError(
            f"head dims must be at most {most} for the triton backend in {q.dtype}; got D = {q.shape[3]} and Dv = "
            f"{v_dim}. Use {'' if most == MOST_DIM else 'bf16, fp16 or '}backend='reference'."
        )
    if choices > MOST_CHOICES:
        raise ValueError(
            f"index must list at most {MOST_CHOICES} tokens of a query for the triton backend; got {choices}. Use "
            "attention with a mask."
        )
    sizes = *k.shape[:2], q.shape[2], group
    check_count("batch x key heads x queries x tiles of heads", *sizes, remedy="Split the batch.")


def sorted_lists(index: Tensor, k_len: int, causal: bool) -> Chosen:
    """The lists `[B, Hkv, Nq, K]` in ascending order."""
    (_, kv_heads, q_len, choices), device = index.shape, index.device
    chosen = Chosen(
        torch.empty(index.shape, dtype=torch.int32, device=device),
        torch.empty(index.shape[:3], dtype=torch.int32, device=device),
    )
    if chosen.counts.numel():
        index = index if index.stride(-1) == 1 or choices == 1 else index.contiguous()
        with on_device(device):
            sort_kernel[(chosen.counts.numel(),)](
                index, *chosen, q_len, k_len, k_len - q_len, choices, *index.stride()[:3], kv_heads, causal,
                power(choices), num_warps=4 if choices <= 2048 else 8, **OPTIONS,
            )  # fmt: skip
    return chosen


def forward(
    q: Tensor, k: Tensor, v: Tensor | None, index: Tensor, v_dim: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Chosen, Tensor]:
    """`(out, lse, chosen, kept)`. v: None if the first `v_dim` columns of k are the values (`shares_values`)."""
    out, lse = empty_out(q, k[..., :v_dim] if v is None else v), empty_lse(q)
    chosen = sorted_lists(index, k.shape[2], causal)
    of = sizes_of(q, k, v, v_dim, index.shape[3], scale, backward=False)
    kept = empty_kept(q)
    if lse.numel() == 0:
        return out, lse, chosen, kept
    q, k, v = readable(q), readable(k), None if v is None else readable(v)
    with on_device(q.device):
        forward_kernel[(of.rows * of.shape.TILES,)](
            q, k, v, *chosen, out, lse, kept if of.keep else None, *of.numbers, 0, kept.shape[-1], scale, of.qk_scale,
            strides_of(q, k, v, out), of.shape, **of.options, **OPTIONS,
        )  # fmt: skip
    return out, lse, chosen, kept


def scores(q: Tensor, k: Tensor, index: Tensor, causal: bool, scale: float) -> tuple[Tensor, Chosen]:
    """`(scores fp32 [B, Hq, Nq, K], chosen)`: of the tokens of sorted lists, -inf for entries that are none."""
    chosen = sorted_lists(index, k.shape[2], causal)
    found = torch.empty(*q.shape[:3], index.shape[3], dtype=torch.float32, device=q.device)
    if found.numel():
        q, k = readable(q), readable(k)
        of = sizes_of(q, k, None, 1, index.shape[3], scale, backward=False, scores=True)
        with on_device(q.device):
            scores_kernel[(of.rows * of.shape.TILES,)](
                q, k, *chosen, found, *of.numbers, 0, scale, strides_of(q, k), of.shape, **of.options, **OPTIONS
            )
    return found, chosen
