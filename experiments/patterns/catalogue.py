"""The patterns that the gallery draws and the table measures, one entry each.

To add a pattern, add an entry to PATTERNS; `tests/test_patterns_catalogue.py` holds its `live` against its builder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from sparseflash import BlockMask, masks

LONG, MEDIUM = 1 << 20, 1 << 17  # tokens: 1M for at most about N log N live tiles, 128K for the others

Build = Callable[[int, int], BlockMask]
# live(head, q, k, tokens, block): the rule of a FlexAttention mask_mod, on scalars or broadcastable tensors.
Live = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]


@dataclass(frozen=True)
class Pattern:
    """One entry: `build(tokens, block)` makes the mask."""

    name: str
    group: str
    rule: str  # one line, of tokens q and k, or of blocks i (of queries) and j (of keys)
    build: Build
    live: Live | None = None  # the same rule for FlexAttention; None: it has no formula
    tokens: int = LONG  # at which its building is timed
    causal: bool = False  # full reach then means every key up to the query's own position
    stack: Callable[[int, int], Sequence[BlockMask]] | None = None  # the masks of successive layers, if they differ


def _one_bit(x: Tensor) -> Tensor:
    """Whether at most one bit is set."""
    return (x & (x - 1)) == 0


PATTERNS: list[Pattern] = [
    Pattern(
        "dense", "basic", "every score", lambda n, block: BlockMask.dense(n, block=block),
        lambda h, q, k, n, block: (q >= 0) & (k >= 0), tokens=MEDIUM,
    ),
    Pattern(
        "causal", "basic", "k <= q", lambda n, block: masks.causal(n, block=block),
        lambda h, q, k, n, block: k <= q, tokens=MEDIUM, causal=True,
    ),
    Pattern(
        "local", "windows", "|q - k| <= 128", lambda n, block: masks.local(n, 256, block=block),
        lambda h, q, k, n, block: (q - k).abs() <= 128,
    ),
    Pattern(
        "local, causal", "windows", "q - 256 < k <= q", lambda n, block: masks.local(n, 256, causal=True, block=block),
        lambda h, q, k, n, block: (k <= q) & (q - k < 256), causal=True,
    ),
    Pattern(
        "butterfly", "butterfly", "i = j, or i XOR j a power of two", lambda n, block: masks.butterfly(n, block=block),
        lambda h, q, k, n, block: _one_bit((q // block) ^ (k // block)),
    ),
    Pattern(
        "butterfly, 3 factors", "butterfly", "i = j, or i XOR j in 1, 2, 4",
        lambda n, block: masks.butterfly(n, factors=3, block=block),
        lambda h, q, k, n, block: _one_bit((q // block) ^ (k // block)) & ((q // block) ^ (k // block) < 8),
    ),
    Pattern(
        "butterfly, causal", "butterfly", "i = j and k <= q, or i - j a power of two",
        lambda n, block: masks.butterfly(n, causal=True, block=block),
        lambda h, q, k, n, block: (k <= q) & _one_bit((q // block - k // block).clamp(min=0)), causal=True,
    ),
]  # fmt: skip


def select(names: Sequence[str] | None) -> list[Pattern]:
    """The entries of these names, in the catalogue's order; all without names."""
    if not names:
        return PATTERNS
    known = {pattern.name for pattern in PATTERNS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"a pattern must be one of {'; '.join(sorted(known))}; got {'; '.join(unknown)}.")
    return [pattern for pattern in PATTERNS if pattern.name in names]
