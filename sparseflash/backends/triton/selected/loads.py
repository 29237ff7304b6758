"""Loads of gathered tokens and of rows of heads, and the columns that a head dim is cut into."""

import triton
import triton.language as tl

from sparseflash.backends.triton.selected.lists import NONE


@triton.jit
def columns(x_ptr, offsets, live, FIRST: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    """The columns FIRST to FIRST + DIM of the rows at `offsets`, [ROWS, PADDED]; zeros elsewhere.

    live: which rows there are, or None if all are.
    """
    dims = tl.arange(0, PADDED)
    pointers = x_ptr + offsets[:, None] + (FIRST + dims)[None, :]
    if live is None:
        if DIM == PADDED:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)
    elif DIM == PADDED:
        return tl.load(pointers, mask=live[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=live[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def store_columns(x_ptr, x, offsets, live, FIRST: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Stores `x [ROWS, PADDED]` where `columns` would read it."""
    dims = tl.arange(0, PADDED)
    pointers = x_ptr + offsets[:, None] + (FIRST + dims)[None, :]
    tl.store(pointers, x.to(x_ptr.dtype.element_ty), mask=live[:, None] & (dims < DIM)[None, :])


@triton.jit
def listed_tokens(list_ptr, first, choices, TOKENS: tl.constexpr):
    """TOKENS entries of a list from `first` on; NONE past its end."""
    at = first + tl.arange(0, TOKENS)
    return tl.load(list_ptr + at, mask=at < choices, other=NONE)


@triton.jit
def token_offsets(tokens, live, stride, FAR: tl.constexpr):
    """The offsets of tokens, in 64 bits if FAR; of the first token where `live` is False, so that none overflows."""
    tokens = tl.where(live, tokens, 0)
    if FAR:
        tokens = tokens.to(tl.int64)
    return tokens * stride


@triton.jit
def place_of_program(
    first_row, q_len, kv_heads, group, ROWS: tl.constexpr, TILES: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """`(row of lists, batch, kv head, query, head of each row of the tile, which of those are in the group)`.

    Programs are counted by list, tile of heads, and piece of the columns.
    """
    row = first_row + (tl.program_id(0) // (TILES * PIECES)).to(tl.int64)
    pair = row // q_len
    in_group = tl.program_id(0) // PIECES % TILES * ROWS + tl.arange(0, ROWS)
    batch, kv_head = pair // kv_heads, pair % kv_heads
    return row, batch, kv_head, row % q_len, kv_head * group + in_group, in_group < group
