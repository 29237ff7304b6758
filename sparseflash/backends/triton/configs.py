"""Tile sizes by (architecture, head dim, dtype).

Nothing is tuned at run time: the first call compiles one configuration of each kernel, and results do not depend on
timings. `portable/fitting.py` cuts tiles down to the blocks of a mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from sparseflash.backends.triton.versions import triton_version

Kernel = Literal["forward", "dk_dv", "dq"]
Arithmetic = Literal["half", "tf32", "fp32"]


class Config(NamedTuple):
    """Tile of queries, tile of keys, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    # Maximum number of registers per thread, or 0 for no limit. One more resident program per SM can be worth some
    # spills outside the loops: three programs of four warps fit with 168 registers, four with 128.
    registers: int = 0
    # The forward keeps the queries in registers, which saves space and reads in shared memory.
    q_in_registers: bool = False

    def __str__(self) -> str:
        """The format of `python -m experiments.benchmarks.tune --config`.

        >>> print(Config(64, 128, 4, 2), Config(64, 64, 4, 3, 168), Config(64, 64, 4, 3, q_in_registers=True))
        64x128x4x2 64x64x4x3x168 64x64x4x3q
        """
        numbers = self[:5] if self.registers else self[:4]
        return "x".join(map(str, numbers)) + "q" * self.q_in_registers


_COPYING = triton_version() >= (3, 9)

# (kernel, arithmetic, widest padded head dim) -> configuration. "half" is fp16 and bf16. "fp32" splits every number
# into three bf16 pieces: see device_functions/fp32_split.py.
_Key = tuple[Kernel, Arithmetic, int]
_Table = dict[_Key, Config]


def _of_dims(kernel: Kernel, arithmetic: Arithmetic, *configs: tuple[Any, ...]) -> _Table:
    """The fields of a `Config` for head dims up to 32, 64, 128 and 256, as far as they are given."""
    return {(kernel, arithmetic, dim): Config(*each) for dim, each in zip((32, 64, 128, 256), configs)}


# sm_80: 163 KiB of shared memory per program.
_AMPERE: _Table = {
    **_of_dims("forward", "half", (128, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 2), (64, 64, 8, 1)),
    **_of_dims("dk_dv", "half", (64, 64, 4, 2), (64, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 1)),
    **_of_dims("dq", "half", (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
    **_of_dims("forward", "tf32", (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
    **_of_dims("dk_dv", "tf32", (32, 64, 4, 2), (32, 64, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1)),
    **_of_dims("dq", "tf32", (64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1)),
    **_of_dims("forward", "fp32", (64, 32, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1), (16, 32, 4, 1)),
    **_of_dims("dk_dv", "fp32", (32, 32, 4, 1), (32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 8, 1)),
    **_of_dims("dq", "fp32", (64, 32, 4, 2), (32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 8, 1)),
}

# sm_86, sm_89, sm_120: 99 KiB of shared memory per program.
_CONSUMER: _Table = {
    **_AMPERE,
    ("forward", "half", 256): Config(32, 32, 4, 1),
    ("dk_dv", "half", 256): Config(16, 32, 4, 1),
    ("dk_dv", "tf32", 256): Config(16, 16, 4, 1),
    ("forward", "fp32", 256): Config(16, 32, 8, 1),
}

# sm_90, with tensor descriptors.
_HOPPER: _Table = {
    **_AMPERE,
    **_of_dims("forward", "half", (64, 128, 4, 3), (64, 64, 4, 3, 0, True), (128, 64, 4, 2), (128, 64, 8, 2)),
    **_of_dims("dk_dv", "half", (64, 64, 4, 2), (64, 64, 4, 3, 168), (64, 64, 4, 2), (64, 64, 8, 1)),
    **_of_dims("dq", "half", (64, 64, 4, 2), (64, 64, 4, 2, 128), (128, 64, 8, 3), (64, 64, 8, 1)),
    **_of_dims("forward", "fp32", (64, 64, 4, 2), (64, 32, 4, 2), (128, 32, 8, 2)),
    **_of_dims("dk_dv", "fp32", (64, 64, 4, 2), (32, 64, 4, 2), (16, 64, 4, 2)),
    **_of_dims("dq", "fp32", (64, 64, 4, 2), (64, 32, 4, 2), (64, 64, 4, 1)),
}

# From Triton 3.9 on, operands in registers are copied before each wgmma, so the wgmmas wait for one another.
_HOPPER_COPYING: _Table = {**_HOPPER, ("forward", "half", 64): Config(64, 128, 4, 2)}

# Used instead if the mask's blocks limit the tile that a program holds to 64 tokens.
_HOPPER_64: _Table = {
    ("forward", "half", 128): Config(64, 64, 4, 2, q_in_registers=not _COPYING),
    ("dq", "half", 128): Config(64, 64, 4, 2),
}

# Used instead with a bias for each pair (query, key).
_HOPPER_BIASED: _Table = {
    ("forward", "half", 64): Config(64, 64, 4, 3, 168),
    ("forward", "half", 128): Config(128, 64, 8, 3),
    ("dk_dv", "half", 64): Config(64, 64, 4, 2, 168),
    ("dk_dv", "half", 128): _HOPPER["dk_dv", "half", 128],
    ("dq", "half", 64): Config(64, 64, 4, 3),
}

# Used instead with a tile bias, which the kernels do not load through shared memory.
_HOPPER_TILE_BIASED: _Table = {**_HOPPER_64, ("dk_dv", "half", 128): _HOPPER["dk_dv", "half", 128]}

# Used instead with a relative position table.
_HOPPER_TABLE: _Table = {
    ("forward", "half", 128): _HOPPER_BIASED["forward", "half", 128],
    ("dk_dv", "half", 64): _HOPPER_BIASED["dk_dv", "half", 64],
    ("dk_dv", "half", 128): _HOPPER_BIASED["dk_dv", "half", 128],
    ("dq", "half", 64): Config(64, 64, 4, 2, 168),
    ("dq", "half", 128): Config(64, 64, 4, 2),
}

# sm_90 with pointer loads: their addresses take registers, so tiles are smaller.
_HOPPER_POINTERS: _Table = {
    **_HOPPER,
    ("forward", "half", 64): Config(64, 128, 4, 2),
    ("forward", "half", 128): Config(64, 64, 4, 2),
    ("forward", "half", 256): Config(64, 64, 8, 2),
    ("dk_dv", "half", 64): Config(64, 64, 4, 3),
    ("dq", "half", 64): Config(64, 64, 4, 2),
    ("dq", "fp32", 64): Config(64, 32, 4, 1),
}

# sm_100 and sm_103, not measured: as on Hopper, in tables of their own, which a measurement there may change.
_BLACKWELL: _Table = {**(_HOPPER_COPYING if _COPYING else _HOPPER)}
_BLACKWELL_POINTERS: _Table = {**_HOPPER_POINTERS}


class Tables(NamedTuple):
    """The tables of one architecture."""

    pointers: _Table
    descriptors: _Table  # with tensor descriptors (TMA), if the architecture has them
    has_room: bool  # for fp32 tiles in three pieces at any head dim
    held_64: Mapping[_Key, Config] = MappingProxyType({})
    biased: Mapping[_Key, Config] = MappingProxyType({})
    tile_biased: Mapping[_Key, Config] = MappingProxyType({})
    table: Mapping[_Key, Config] = MappingProxyType({})

    def of(self, descriptors: bool) -> _Table:
        return self.descriptors if descriptors else self.pointers

    def has_room_for_pieces(self, padded_dim: int) -> bool:
        """Whether fp32 tiles in three pieces fit in shared memory.

        Otherwise tiles are split after they are loaded.
        """
        return self.has_room or padded_dim <= 128


AMPERE = Tables(_AMPERE, _AMPERE, has_room=True)
CONSUMER = Tables(_CONSUMER, _CONSUMER, has_room=False)
HOPPER = Tables(
    _HOPPER_POINTERS, _HOPPER_COPYING if _COPYING else _HOPPER, has_room=True, held_64=_HOPPER_64,
    biased=_HOPPER_BIASED, tile_biased=_HOPPER_TILE_BIASED, table=_HOPPER_TABLE,
)  # fmt: skip
BLACKWELL = HOPPER._replace(pointers=_BLACKWELL_POINTERS, descriptors=_BLACKWELL)


def arithmetic_of(dtype: torch.dtype, tf32: bool) -> Arithmetic:
    """How products of this dtype are computed."""
    if dtype != torch.float32:
        return "half"
    return "tf32" if tf32 else "fp32"
