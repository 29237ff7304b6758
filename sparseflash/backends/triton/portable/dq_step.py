"""What the backward over rows does with one tile of keys: the weights once more, then the gradients."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sparseflash.backends.triton.portable.arithmetic import product
from sparseflash.backends.triton.portable.biases import store_pair_gradients, store_tile_gradients
from sparseflash.backends.triton.portable.change_flags import CAPPED
from sparseflash.backends.triton.portable.dropout import kept_weights
from sparseflash.backends.triton.portable.fp32_split import accumulate, products
from sparseflash.backends.triton.portable.loads import live_in_row, load_tokens, token_numbers
from sparseflash.backends.triton.portable.position_tables import (
    add_run_gradients,
    add_table_gradients,
    code_differences,
    entries_at,
)
from sparseflash.backends.triton.portable.scores import changed_scores, loaded_biases, slope_gradients
from sparseflash.backends.triton.portable.softmax import recomputed_weights, score_gradients


@triton.jit
def row_step(
    q_tile, dout_tile, k, v, lse2, inverse, words_ptr, tile, place, first_k, q_len, k_len, k_length, scale, qk_scale,
    k_strides, v_strides, dropout, changes,
    D: tl.constexpr, DV: tl.constexpr, PADDED_D: tl.constexpr, PADDED_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GATHERED: tl.constexpr, HAS_LENGTHS: tl.constexpr, DROPOUT: tl.constexpr, KEEP: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, CHANGES: tl.constexpr, OWN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys in the backward over rows: `(keys, exponentials, weights, gradients of the weights, derivative
    of the scores' cap, what one's own function returned)`.
    """
    k_tile = load_tokens(
        k, place.batch, place.kv_head, first_k, k_len, k_strides, D, PADDED_D, BLOCK_N, not MASKED, TMA, PRECISION,
    )  # fmt: skip
    v_tile = load_tokens(
        v, place.batch, place.kv_head, first_k, k_len, v_strides, DV, PADDED_DV, BLOCK_N, not MASKED, TMA, PRECISION,
    )  # fmt: skip
    if CHANGES:
        biases = loaded_biases(
            changes, place.batch, place.head, place.first_q, first_k, q_len, k_len, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_N,
            MASKED, False,
        )  # fmt: skip
    scores = products(q_tile, k_tile, PRECISION)
    factor, own = 1.0, (1.0, ())
    if CHANGES:
        scores, factor, own = changed_scores(
            scores, biases, changes, scale, place.batch, place.head, place.first_q, first_k, q_len, k_len, BLOCK_M,
            BLOCK_N, CHANGES, OWN, False,
        )  # fmt: skip
    live, inverses = None, None
    if MASKED:
        live = live_in_row(
            words_ptr, tile, place.first_q, first_k, k_length, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_N, GATHERED,
            HAS_LENGTHS,
        )  # fmt: skip
    if KEEP:
        inverses = inverse[:, None]
    exps, p = recomputed_weights(scores, live, lse2[:, None], inverses, qk_scale, KEEP, PRECISION, CHANGES)
    dp = products(dout_tile, v_tile, PRECISION)
    if DROPOUT:
        keep = kept_weights(dropout, place.batch_head, place.first_q, first_k, q_len, k_len, BLOCK_M, BLOCK_N, False)
        dp = tl.where(keep, dp * dropout.amplification, 0.0)
    return k_tile, exps, p, dp, factor, own


class LearnedArguments(NamedTuple):
    """The arguments of `dq_kernel` for the gradients of what changes of scores learn, by the kernel's names."""

    dslopes_ptr: Any
    dbias_ptr: Any
    pair_strides: Any
    dtiles_ptr: Any
    dtiles_starts_ptr: Any
    dtable_ptr: Any
    buckets_ptr: Any
    table_size: Any
    own_parts: Any


class LearnedSums(NamedTuple):
    """What a program sums of these gradients while it walks its row; () for what is not learned."""

    slopes: Any  # by query, [BLOCK_M]
    table: Any  # the `table_sums` of add_run_gradients
    own: Any  # of one's own function, by query


@triton.jit
def own_table(learned):
    """This program's own copy of the gradients of a table."""
    return learned.dtable_ptr + tl.cast(tl.program_id(0), tl.int64) * learned.table_size


@triton.jit
def learned_step(
    ds, factor, table_sums, learned, changes, place, first_k, q_len, k_len,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHANGES: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of biases and a table by one tile: `(those of the products without the scale, table_sums)`.

    See add_run_gradients for `table_sums`.
    """
    rows, keys = token_numbers(place.first_q, BLOCK_M), token_numbers(first_k, BLOCK_N)
    if learned.dbias_ptr is not None:
        store_pair_gradients(
            ds, learned.dbias_ptr, learned.pair_strides, place.batch, place.head, place.first_q, first_k, q_len, k_len,
            MASKED,
        )  # fmt: skip
    if learned.dtiles_ptr is not None:
        store_tile_gradients(
            ds, learned.dtiles_ptr, learned.dtiles_starts_ptr, changes.tile_bias_ptrs, changes.tile_numbers,
            place.batch_head, place.batch, place.head, place.first_q, first_k, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    if learned.dtable_ptr is not None:
        dtable_ptr = own_table(learned)
        if changes.until_ptr is not None:
            table_sums = add_run_gradients(
                table_sums, ds, dtable_ptr, learned.buckets_ptr, changes, place.first_q, first_k, rows, keys, q_len,
                k_len, BLOCK_M, BLOCK_N, CHANGES,
            )  # fmt: skip
        else:
            at = code_differences(changes, rows, keys, q_len, k_len, False)
            add_table_gradients(ds, dtable_ptr, entries_at(learned.buckets_ptr, at, CHANGES), None)
    if CAPPED & CHANGES:
        ds = ds * factor
    return ds, table_sums


@triton.jit
def own_step(
    ds, own, own_sums, learned, own_numbers, place, first_k, q_len, k_len,
    BLOCK_M: tl.constexpr, OWN_SUMS: tl.constexpr, OWN_STORES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The gradients of one's own function by one tile: `(those of the scores before it, the sums of its queries)`."""
    if OWN_SUMS is not None:
        own_sums = OWN_SUMS(own_sums, ds, own[1], BLOCK_M)
    if OWN_STORES is not None:
        OWN_STORES(
            ds, own[1], learned.own_parts, own_numbers, learned.pair_strides, place.batch, place.head, place.first_q,
            first_k, q_len, k_len, MASKED,
        )  # fmt: skip
    return product(ds, own[0]), own_sums


@triton.jit
def dq_step(
    dq, sums, k_tile, p, dp, delta, dlse, factor, own, learned, changes, place, first_k, q_len, k_len,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, CHANGES: tl.constexpr, OWN: tl.constexpr, OWN_SUMS: tl.constexpr,
    OWN_STORES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of one tile of keys, from what `row_step` returned, to dq (without the scale) and to the
    gradients of what changes of scores learn: `(dq, LearnedSums)`.
    """
    dslopes, table_sums, own_sums = sums
    ds = score_gradients(p, dp, delta[:, None], dlse)
    if OWN is not None:
        ds, own_sums = own_step(
            ds, own, own_sums, learned, changes.own_numbers, place, first_k, q_len, k_len, BLOCK_M, OWN_SUMS,
            OWN_STORES, MASKED,
        )  # fmt: skip
    if learned.dslopes_ptr is not None:
        dslopes += slope_gradients(ds, place.first_q, first_k, q_len, k_len, CHANGES)
    if CHANGES:
        ds, table_sums = learned_step(
            ds, factor, table_sums, learned, changes, place, first_k, q_len, k_len, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_N,
            CHANGES, MASKED,
        )  # fmt: skip
    return accumulate(ds, k_tile, dq, PRECISION), LearnedSums(dslopes, table_sums, own_sums)
