"""Sorts the lists of chosen tokens, one program a list."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

NONE = tl.constexpr(2**31 - 1)  # no token: larger than any


class Chosen(NamedTuple):
    """The lists of chosen tokens, sorted: see `sort_kernel`."""

    lists: Tensor  # int32 [B, Hkv, Nq, K]
    counts: Tensor  # int32 [B, Hkv, Nq]


@triton.jit(do_not_specialize=["q_len", "k_len", "shift", "choices", "stride_b", "stride_h", "stride_n", "kv_heads"])
def sort_kernel(
    index_ptr,  # int [B, Hkv, Nq, choices]; its last stride is 1
    lists_ptr, counts_ptr,  # int32 [B, Hkv, Nq, choices], [B, Hkv, Nq]
    q_len, k_len, shift, choices, stride_b, stride_h, stride_n, kv_heads,
    CAUSAL: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Writes one list in ascending order, with NONE for repetitions and at the end, and where that end begins.

    Numbers of no token are left out, and if CAUSAL, tokens after `query + shift`.
    """
    row = tl.program_id(0).to(tl.int64)
    query, pair = row % q_len, row // q_len
    index_ptr += pair // kv_heads * stride_b + pair % kv_heads * stride_h + query * stride_n
    lane = tl.arange(0, CHOICES)
    token = tl.load(index_ptr + lane, mask=lane < choices, other=-1).to(tl.int64)
    live = (token >= 0) & (token < k_len)
    if CAUSAL:
        live = live & (token <= query + shift)
    token = tl.where(live, token, NONE).to(tl.int32)
    before = tl.gather(token, tl.maximum(lane - 1, 0), 0)
    unordered = (token <= before) & (token != NONE) & (lane > 0)
    if tl.max(unordered.to(tl.int32), 0) > 0:  # an indexer's choice is in order; a sort of 2,052 tokens takes long
        token = tl.sort(token)
        before = tl.gather(token, tl.maximum(lane - 1, 0), 0)
    count = tl.sum((token != NONE).to(tl.int32), 0)
    token = tl.where((token == before) & (lane > 0), NONE, token)
    tl.store(lists_ptr + row * choices + lane, token, mask=lane < choices)
    tl.store(counts_ptr + row, count)
