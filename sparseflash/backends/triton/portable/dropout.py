"""Dropout in the kernels: which weights of a tile are kept."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sparseflash.backends.triton.device_functions.loads import token_numbers

GROUP = tl.constexpr(16)
ROUNDS = tl.constexpr(7)


class DropoutArguments(NamedTuple):
    """The arguments of a kernel for dropout, by the kernel's names."""

    seed_ptr: Any  # int64 [1]
    rows_ptr: Any  # global coordinates of rows, queries and groups of keys, if this is a part of a larger problem, or
    queries_ptr: Any  # None: see `Dropout`
    groups_ptr: Any
    dropped: Any  # out of 256 weights
    amplification: Any  # the factor of kept weights


@triton.jit
def kept_weights(
    dropout, row, first_q, first_k, q_len, k_len,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Bools `[TILE_M, TILE_N]`, or `[TILE_N, TILE_M]` if TRANSPOSED, for the tile at (first_q, first_k).

    `row` is batch element * Hq + query head. first_q and first_k may also be the numbers of all tokens of a gathered
    tile (see loads.py). One Philox counter gives 16 bytes, one for each of 16 keys.
    """
    GROUPS: tl.constexpr = TILE_N // GROUP
    seed = tl.load(dropout.seed_ptr)
    q = token_numbers(first_q, TILE_M)
    if first_k.type.is_block():
        group = tl.min(first_k.reshape(GROUPS, GROUP), 1) // GROUP
    else:
        group = first_k // GROUP + tl.arange(0, GROUPS)
    # Tokens past the ends are dead, whatever is drawn for them.
    if dropout.rows_ptr is not None:
        row = tl.load(dropout.rows_ptr + row)
    if dropout.queries_ptr is not None:
        q = tl.load(dropout.queries_ptr + tl.minimum(q, q_len - 1))
    if dropout.groups_ptr is not None:
        group = tl.load(dropout.groups_ptr + tl.minimum(group, (k_len - 1) // GROUP))
    if TRANSPOSED:
        c0, c1 = tl.broadcast(group[:, None], q[None, :])
    else:
        c0, c1 = tl.broadcast(group[None, :], q[:, None])
    zero = tl.zeros_like(c0)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, zero + row, zero, ROUNDS)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [.., .., 2, 2]: in word order
    shift = 8 * tl.arange(0, 4)
    if TRANSPOSED:
        words = words.permute(0, 2, 3, 1).reshape(GROUPS * 4, TILE_M)
        draws = (words[:, None, :] >> shift[None, :, None]) & 0xFF
        return draws.reshape(TILE_N, TILE_M) >= dropout.dropped
    else:
        words = words.reshape(TILE_M, GROUPS * 4)
        draws = (words[:, :, None] >> shift[None, None, :]) & 0xFF
        return draws.reshape(TILE_M, TILE_N) >= dropout.dropped
