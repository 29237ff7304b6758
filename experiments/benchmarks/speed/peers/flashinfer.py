"""FlashInfer (`flashinfer-python`, written for 0.7.2.post1): chosen blocks, forward alone, and decoding. Functions here
plan on the host, and return the call to time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.benchmarks.harness import Unavailable
from sparseflash import BlockMask

WORKSPACE = 256 * 2**20  # bytes; its documentation recommends 128 MB


class Package(NamedTuple):
    BlockSparseAttentionWrapper: Callable[..., Any]
    VariableBlockSparseAttentionWrapper: Callable[..., Any]
    BatchDecodeWithPagedKVCacheWrapper: Callable[..., Any]
    single_decode_with_kv_cache: Callable[..., Tensor]


def load() -> Package:
    try:
        import flashinfer
    except ImportError as failure:
        raise Unavailable(f"flashinfer-python is not installed: {failure}") from failure
    return Package(*(getattr(flashinfer, name) for name in Package._fields))


def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)


def masks_of_heads(
    mask: BlockMask, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, backend: str = "auto"
) -> Callable[[], Tensor]:
    """The wrapper copies q and the output into and out of its own order.

    With `causal` its kernels align the queries of a row with the last keys that the row lists: the row's own block, as
    blocks are in order.
    """
    wrapper = load().VariableBlockSparseAttentionWrapper(_workspace(q.device), backend=backend)
    layout = _layout(mask, q, k)
    sizes = torch.full(layout.shape[:2], mask.block_q, dtype=torch.int32, device=q.device)
    wrapper.plan(layout, sizes, sizes, q.shape[1], k.shape[1], q.shape[3], causal=causal, q_data_type=q.dtype)
    return lambda: wrapper.run(q[0], k[0], v[0])[None]


def heads_as_rows(mask: BlockMask, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Callable[[], Tensor]:
    """One mask for all heads: heads of keys are concatenated into one sequence, with whole blocks as pages. Tensors
    have the wrapper's order from the start."""
    wrapper = load().BlockSparseAttentionWrapper(_workspace(q.device))
    layout = _layout(mask, q, k)
    groups, tokens = k.shape[1], q.shape[2]
    head, _, column = layout.nonzero(as_tuple=True)
    wrapper.plan(
        F.pad(layout.sum(-1).flatten().cumsum(0), (1, 0)).int(), (head * layout.shape[2] + column).int(),
        groups * tokens, groups * tokens, mask.block_q, mask.block_k, q.shape[1] // groups, 1, q.shape[3],
        causal=causal, q_data_type=q.dtype, o_data_type=q.dtype,
    )  # fmt: skip
    rows = [x[0].unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).contiguous() for x in (q, k, v)]
    return lambda: wrapper.run(*rows).unflatten(0, (groups, tokens)).transpose(1, 2).flatten(0, 1)[None]


def _layout(mask: BlockMask, q: Tensor, k: Tensor) -> Tensor:
    return mask.to_layout()[0, :: q.shape[1] // k.shape[1]]


def decode_paged(
    q: Tensor, *, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths: Tensor
) -> Callable[[], Tensor]:
    """New tokens over caches in pages `[pages, Hkv, page, D]`, each sequence's table of pages full."""
    batch, heads, new, dim = q.shape
    kv_heads, page = k_cache.shape[1:3]
    # Tensor cores, as SGLang decides for groups of four query heads and more.
    wrapper = load().BatchDecodeWithPagedKVCacheWrapper(_workspace(q.device), "NHD", use_tensor_cores=True)
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32) * block_table.shape[1], block_table.flatten(),
        (lengths - 1) % page + 1, heads, kv_heads, dim, page,
        q_data_type=q.dtype, q_len_per_req=new,
    )  # fmt: skip
    rows = q.transpose(1, 2).flatten(0, 1).contiguous()
    caches = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    return lambda: wrapper.run(rows, caches).unflatten(0, (batch, new)).transpose(1, 2)


def decode_contiguous(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    run = load().single_decode_with_kv_cache
    return lambda: run(q[0, :, 0], k[0], v[0], kv_layout="HND", use_tensor_cores=True)[None, :, None]
