"""Dropout of attention weights without stored state: a weight's fate is computed from the seed and its position.

Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a 64-bit seed and a counter
of four 32-bit words, here `(key // 16, query, batch element * Hq + query head, 0)`, into 16 bytes, one for each of 16
neighbouring keys. A weight is dropped if its byte is below a threshold. So forward, backward and every backend drop the
same weights. This file is the definition, in PyTorch; `backends/triton/portable/dropout.py` is the same in Triton.
"""

from __future__ import annotations

import operator
from typing import NamedTuple, SupportsIndex

import torch
from torch import Tensor

GROUP = 16  # keys that share a counter
_LEVELS = 256  # one byte decides
_ROUNDS = 7
_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85


class Dropout(NamedTuple):
    """The dropout of a call, as backends take it.

    >>> seed = torch.tensor([0])
    >>> whole = kept_everywhere(Dropout(seed, 64), 1, 1, 48, 48)
    >>> part = Dropout(seed, 64, queries=torch.tensor([40, 41], dtype=torch.int32), groups=torch.tensor([2, 0]).int())
    >>> torch.equal(kept_everywhere(part, 1, 1, 2, 32), torch.cat([whole[..., 40:42, 32:], whole[..., 40:42, :16]], -1))
    True

    The last three are for a call on a part of a problem: the words of its counters in the whole, int32, on the seed's
    device. None: the same as in the call. `groups` has one entry for 16 keys, so 16 neighbouring keys of the call, from
    a multiple of 16 on, must also be 16 such keys of the whole problem.
    """

    seed: Tensor  # one int64
    dropped: int  # out of 256 weights
    rows: Tensor | None = None  # [B, Hq]: batch element * Hq + query head
    queries: Tensor | None = None  # [Nq]
    groups: Tensor | None = None  # [ceil(Nk / 16)]: key // 16

    @property
    def coordinates(self) -> dict[str, Tensor]:
        found = {"rows": self.rows, "queries": self.queries, "groups": self.groups}
        return {name: x for name, x in found.items() if x is not None}


def threshold(dropout_p: float) -> int:
    """How many of 256 weights are dropped: 0 for `dropout_p = 0`, else `256 * dropout_p` rounded and clamped to 1 ..
    255.
    """
    if not isinstance(dropout_p, int | float) and (
        not hasattr(dropout_p, "__float__") or getattr(dropout_p, "ndim", 0) > 0  # type: ignore[unreachable]
    ):
        raise TypeError(f"dropout_p must be a number; got {dropout_p!r}.")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be at least 0 and below 1; got {dropout_p}.")
    return min(_LEVELS - 1, max(1, round(dropout_p * _LEVELS))) if dropout_p > 0.0 else 0


def amplification(dropped: int) -> float:
    """The factor of the kept weights that preserves the expectation."""
    return _LEVELS / (_LEVELS - dropped)


def seed_tensor(seed: SupportsIndex | Tensor | None, device: torch.device) -> Tensor:
    """The seed as the backends take it: one int64 on the device. None draws it from the device's PyTorch generator."""
    if seed is None:
        return torch.randint(-(1 << 63), (1 << 63) - 1, (1,), device=device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != device:
            raise ValueError(
                f"seed must be an int, or one int64 on q's device {device}; "
                f"got {seed.dtype}, shape {list(seed.shape)}, on {seed.device}."
            )
        if not torch.compiler.is_compiling() and seed.is_inference() and not torch.is_inference_mode_enabled():
            seed = seed.clone()  # an inference tensor cannot be saved for the backward
        return seed if seed.ndim < 2 else seed.view(1)
    if isinstance(seed, bool) or not isinstance(seed, int | SupportsIndex):
        raise TypeError(f"seed must be an int, a tensor or None; got {type(seed).__name__}.")
    seed = seed if isinstance(seed, int) else operator.index(seed)
    if not -(1 << 63) <= seed < 1 << 63:
        raise ValueError(f"seed must fit in 64 bits, with its sign; got {seed}.")
    return torch.full((1,), seed, dtype=torch.int64, device=device)


def keep_mask(
    seed: int | Tensor, dropout_p: float, batch: int, heads: int, q_len: int, k_len: int,
    device: torch.device | str | None = None,
) -> Tensor:  # fmt: skip
    """Which weights `attention(..., dropout_p=dropout_p, seed=seed)` keeps: bool `[batch, heads, q_len, k_len]`.

    >>> keep = keep_mask(0, 0.25, 1, 2, 100, 100)
    >>> keep.shape, round(keep.float().mean().item(), 2)
    (torch.Size([1, 2, 100, 100]), 0.75)

    Every kept weight is multiplied by `1 / (1 - p)`, with p rounded to a multiple of 1/256. The result is on `device`,
    by default the seed's or the CPU.
    """
    place = torch.device(device or "cpu")
    if isinstance(seed, Tensor) and (device is None or (place.type == seed.device.type and place.index is None)):
        place = seed.device
    return kept_everywhere(Dropout(seed_tensor(seed, place), threshold(dropout_p)), batch, heads, q_len, k_len)


def kept_everywhere(dropout: Dropout, batch: int, heads: int, q_len: int, k_len: int) -> Tensor:
    """Which weights are kept: bool `[batch, heads, q_len, k_len]`."""
    device = dropout.seed.device
    row = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1)
    query = torch.arange(q_len, device=device).view(-1, 1)
    group = torch.arange(-(-k_len // GROUP), device=device)
    return kept(dropout, row, query, group)[..., :k_len]


def kept(dropout: Dropout, row: Tensor, query: Tensor, group: Tensor) -> Tensor:
    """Which weights are kept: bool `[..., 16 * G]`, for int64 coordinates that broadcast to `[..., G]`.

    In the call, `row` is batch element * Hq + query head, and `group` is key // 16. They may lie past the ends.
    """
    row, query, group = (
        here if there is None else there.long().view(-1)[here.clamp(max=there.numel() - 1)]
        for here, there in ((row, dropout.rows), (query, dropout.queries), (group, dropout.groups))
    )
    counter = [*torch.broadcast_tensors(group, query, row), torch.zeros_like(row)]
    words = torch.stack(philox(dropout.seed, counter), dim=-1)  # [..., G, 4]
    bytes_ = (words.unsqueeze(-1) >> torch.arange(0, 32, 8, device=words.device)) & 0xFF  # [..., G, 4, 4]
    return bytes_.flatten(-3) >= dropout.dropped


def philox(seed: Tensor, counter: list[Tensor], rounds: int = _ROUNDS) -> list[Tensor]:
    """Four random words below 2^32 from one seed and a counter of four words, all int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(rounds):
        low, high = _product(_MULTIPLIERS[0], c0), _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high[1] ^ c1 ^ k0, high[0], low[1] ^ c3 ^ k1, low[0]
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return list(torch.broadcast_tensors(c0, c1, c2, c3))


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    product = a * b  # may overflow a signed int64, which wraps to the same bits
    return product & _WORD, (product >> 32) & _WORD
