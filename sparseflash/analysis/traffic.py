"""Bytes moved between the GPU's main memory (HBM) and its on-chip memory, by FlashAttention's cost model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparseflash.analysis.heads import dims, repeats
from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import check_floating, checked_mask, integer
from sparseflash.blockmask.walks import walks

_LEAST = 16  # queries and keys of the smallest tile for tensor cores
_WORK_ITEM = 32  # bytes of a program's entry in the plan
_FP32 = 4
_INT32 = 4


@dataclass(frozen=True)
class Traffic:
    """Bytes moved by one forward pass over all heads, and for comparison by two dense ones.

    >>> moved = bytes_moved(BlockMask.from_function(lambda q, k: k <= q, 256, block=64), 64)
    >>> moved.queries, moved.keys_values, moved.bits
    (32768, 163840, 2048)

    `queries`: q, read once. `keys_values`: k and v, read for each live tile by each program of its row. `out`: written
    once. `statistics`: lse (in fp32 also statistics of each row for the backward). `index`: work items, block and tile
    numbers. `bits`: of partial tiles. `tile_queries`: the queries that a program holds.

    `dense_flash`: the total with every tile live. `materialized`: of standard attention, which writes scores and
    probabilities to memory and reads them back.
    """

    queries: int
    keys_values: int
    out: int
    statistics: int
    index: int
    bits: int
    tile_queries: int
    dense_flash: int
    materialized: int

    @property
    def total(self) -> int:
        """All bytes of the masked forward pass."""
        return self.queries + self.keys_values + self.out + self.statistics + self.index + self.bits

    def __str__(self) -> str:
        if not self.total:
            return "0 bytes"
        return (
            f"{self.total:,} bytes: {100 * self.keys_values / self.total:.3g} % keys and values, "
            f"{100 * (self.queries + self.out) / self.total:.3g} % queries and output, "
            f"{100 * (self.index + self.bits) / self.total:.3g} % mask; dense FlashAttention moves "
            f"{self.dense_flash / self.total:,.1f} times as much, "
            f"standard attention {self.materialized / self.total:,.1f}"
        )


def bytes_moved(
    mask: BlockMask,
    head_dim: int,
    v_dim: int | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    sram_bytes: int = 192 * 1024,
    tile_queries: int | None = None,
    batch: int | None = None,
    heads: int | None = None,
) -> Traffic:
    """HBM traffic of the forward pass under FlashAttention's model, without a cache.

    >>> eye = torch.arange(128)
    >>> mask = BlockMask.from_tiles(eye, eye, 16384)
    >>> traffic = bytes_moved(mask, 64)
    >>> traffic.tile_queries, traffic.queries, traffic.keys_values
    (128, 2097152, 4194304)
    >>> traffic.dense_flash / traffic.total > 50
    True

    A program holds `m = tile_queries` queries and iterates over the live tiles of its block row. With e bytes per
    number, N queries and head dims D and Dv, each head moves

        q read            e N D
        k and v read      e (D + Dv) * sum over programs, over the live tiles of their row, of the tile's keys
        out, lse written  e N Dv + 4 N           (fp32: 12 N, for the backward)
        index read        32 per program, and for each tile of each program 4, or 8 if it is partial
        bits read         block_q * block_k / 8 for each partial tile

    m is the largest power of two up to `block_q` with which queries, accumulator, statistics and a step of 16 keys fit
    on chip: `e m D + 4 m (Dv + 2) + 16 e (D + Dv) + 64 m <= sram_bytes`. With M the on-chip memory and s the share of
    live tiles, m grows like `M / D` and the total like `N D + s N^2 D^2 / M` (Dao et al., 2022, theorem 2 and
    proposition 4). To model an actual kernel, pass its `tile_queries`.

    `materialized` is standard attention (their algorithm 0): read q, k, write S; read S, write P; read P, v, write out:
    `e (N_q D + N_k D + N_k Dv + N_q Dv + 4 N_q N_k)`.

    Full fp32 counts 4 bytes per number, although the kernel mostly reads three bf16 pieces, 6 bytes. Each head of a
    group reads its keys separately, and the L2 cache is ignored.

    Args:
        head_dim, v_dim: D and Dv; Dv is D by default.
        dtype: of q, k and v.
        batch, heads: of the attention, by default the mask's.
        sram_bytes: on-chip memory of one multiprocessor, by default the A100's 192 KiB, as in the paper.
        tile_queries: the queries that a program holds, a power of two from 16 to `block_q`; by default m, as above.

    Raises ValueError if not even 16 queries fit on chip.
    """
    head_dim, v_dim = dims(head_dim, v_dim)
    check_floating(dtype)
    e = dtype.itemsize
    held = _held(
        checked_mask(mask).block_q, head_dim, v_dim, e, integer(sram_bytes, "sram_bytes", "bytes"), tile_queries
    )
    heads_in_all = repeats(mask, batch, heads) * mask.shape[0] * mask.shape[1]
    times = repeats(mask, batch, heads)
    q_len, k_len, block_q, block_k = mask.q_len, mask.k_len, mask.block_q, mask.block_k
    keys_read = index = bits = 0
    for walk in walks(mask):
        used = times * len(walk.users)
        queries = (walk.q_stop - walk.rows * block_q).clamp(0, block_q)
        programs = -(-queries // held)
        partial = walk.tile > 0
        keys_read += used * int((programs * (k_len - walk.cols * block_k).clamp(max=block_k)).sum())
        index += used * _INT32 * int((programs * (1 + partial)).sum())
        bits += used * _INT32 * bitmask.words_per_row(block_k) * held * int(programs[partial].sum())
    programs_a_head = -(-q_len // held)
    statistics = _FP32 * q_len * (3 if dtype == torch.float32 else 1)
    a_head = e * q_len * (head_dim + v_dim) + statistics + _WORK_ITEM * programs_a_head
    dense = a_head + programs_a_head * (e * k_len * (head_dim + v_dim) + _INT32 * mask.blocks[1])
    standard = e * ((q_len + k_len) * (head_dim + v_dim) + 4 * q_len * k_len)
    return Traffic(
        queries=heads_in_all * e * q_len * head_dim,
        keys_values=e * (head_dim + v_dim) * keys_read,
        out=heads_in_all * e * q_len * v_dim,
        statistics=heads_in_all * statistics,
        index=heads_in_all * _WORK_ITEM * programs_a_head + index,
        bits=bits,
        tile_queries=held,
        dense_flash=heads_in_all * dense,
        materialized=heads_in_all * standard,
    )


def _held(block_q: int, head_dim: int, v_dim: int, e: int, sram_bytes: int, asked: int | None) -> int:
    if asked is not None:
        asked = integer(asked, "tile_queries", "tokens")
        if not _LEAST <= asked <= block_q or asked & (asked - 1):
            raise ValueError(
                f"tile_queries must be a power of two from {_LEAST} to the mask's block_q ({block_q}); got {asked}."
            )
        return asked
    a_query = e * head_dim + _FP32 * (v_dim + 2 + _LEAST)
    keys = _LEAST * e * (head_dim + v_dim)
    most = (sram_bytes - keys) // a_query
    if most < _LEAST:
        need = _LEAST * a_query + keys
        raise ValueError(f"sram_bytes must hold {_LEAST} queries and {_LEAST} keys, {need} bytes; got {sram_bytes}.")
    return min(block_q, 1 << (most.bit_length() - 1))
