"""The gradient of a depthwise convolution's weights: each program sums one tap of one chunk of tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1024  # tokens of a program
_TOKENS, _FEATURES = 32, 128  # of a tile


def launched(gradient: Tensor, x: Tensor, taps: int, side: int) -> Tensor:
    tokens, width = x.shape[0] * x.shape[1], x.shape[2]
    chunks = triton.cdiv(tokens, _CHUNK)
    parts = x.new_empty(chunks, taps, width, dtype=torch.float32)
    features = min(_FEATURES, triton.next_power_of_2(width))
    # The taps of one chunk run together, and read the same tokens from the cache.
    _weight_gradient[taps, chunks, triton.cdiv(width, features)](
        gradient, x, parts, tokens, x.shape[1], width,
        taps=taps, window=round(taps**0.5) if side else taps, side=side, chunk=_CHUNK,
        block_n=_TOKENS, block_w=features,
    )  # fmt: skip
    return parts.sum(0)


@triton.jit
def _weight_gradient(
    gradient, x, parts, tokens, length, width,
    taps: tl.constexpr, window: tl.constexpr, side: tl.constexpr, chunk: tl.constexpr,
    block_n: tl.constexpr, block_w: tl.constexpr,
):  # fmt: skip
    tap, number = tl.program_id(0), tl.program_id(1)
    features = tl.program_id(2) * block_w + tl.arange(0, block_w)
    inside = features < width
    right = tap % window - window // 2
    down = 0
    if side > 0:
        down = tap // window - window // 2
    total = tl.zeros([block_n, block_w], tl.float32)
    for start in range(0, chunk, block_n):
        token = number.to(tl.int64) * chunk + start + tl.arange(0, block_n)
        place = token % length
        if side > 0:
            row, column = place // side + down, place % side + right
            live = (row >= 0) & (row < side) & (column >= 0) & (column < side)
        else:
            live = (place + right >= 0) & (place + right < length)
        live = live & (token < tokens)
        mask = live[:, None] & inside[None, :]
        neighbour = token + down * side + right
        of_token = tl.load(gradient + token[:, None] * width + features[None, :], mask=mask, other=0.0)
        values = tl.load(x + neighbour[:, None] * width + features[None, :], mask=mask, other=0.0)
        total += of_token.to(tl.float32) * values.to(tl.float32)
    tl.store(parts + (number * taps + tap) * width + features, tl.sum(total, 0), mask=inside)
