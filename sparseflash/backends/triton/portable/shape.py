"""The compile-time argument SHAPE of the portable kernels: their tiles, and what of them is compiled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Triton identifies a compile-time argument by its text, in which a dataclass has all its fields.

    In Triton 3.6 a field is no compile-time argument of `tl.zeros`, hence `tl.full`; and a text such as PRECISION must
    be bound to a `tl.constexpr` first.
    """

    D: int
    DV: int
    PADDED_D: int
    PADDED_DV: int
    BLOCK_Q: int  # the tiles of the lists
    BLOCK_K: int
    BLOCK_M: int  # the kernel's tiles; divisors of BLOCK_Q and BLOCK_K
    BLOCK_N: int
    # Block size in tokens of a gathered tile, of keys or in dk_dv_kernel of queries, or 0: see loads.py.
    GATHERED: int
    HAS_LENGTHS: bool
    DROPOUT: bool
    KEEP: bool  # whether maxima are kept unscaled and sums inverted, see softmax.py
    TMA: bool  # whether tiles are loaded by descriptors
    PRECISION: str
    Q_IN_REGISTERS: bool = False  # of forward_kernel
    ROWS_TMA: bool = False  # of dk_dv_kernel: whether lse2 and delta are loaded by descriptors
    DELTA: bool = False  # of dq_kernel, see there
