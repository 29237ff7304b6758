"""The place of each (token, query) of a chunk in a list sorted by token, then by query, without sorting.

A bit says whether a query of the chunk has chosen a token. The place of a choice is the number of choices of earlier
tokens, plus the earlier queries that have chosen this token: integers, whatever the order in which programs set bits.
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.selected.loads import listed_tokens


@triton.jit
def ones(x):
    """The number of bits that are set in each int32."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x + (x >> 8) + (x >> 16) + (x >> 24)) & 0x3F).to(tl.int32)


@triton.jit
def place_in_chunk(list_row, first_row, queries):
    """`(pair of batch element and key head, query)` of a program, counted from the first of the chunk."""
    row = list_row - first_row
    return row // queries, row % queries


@triton.jit(do_not_specialize=["first_row", "queries", "k_len", "choices"])
def mark_kernel(
    lists_ptr, counts_ptr,  # as sort_kernel writes them
    bits_ptr,  # int32 [pairs of the chunk, k_len, WORDS], zeros
    first_row, queries, k_len, choices, WORDS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Sets the bits of one query."""
    row = first_row + tl.program_id(0).to(tl.int64)
    pair, query = place_in_chunk(row, first_row, queries)
    bits_ptr += pair * k_len * WORDS + query // 32
    bit = (tl.full([TOKENS], 1, tl.int32) << (query % 32).to(tl.int32)).to(tl.int32)
    for first in range(0, tl.load(counts_ptr + row), TOKENS):
        tokens = listed_tokens(lists_ptr + row * choices, first, choices, TOKENS)
        live = tokens < k_len
        tl.atomic_or(bits_ptr + tl.where(live, tokens, 0).to(tl.int64) * WORDS, bit, mask=live, sem="relaxed")


@triton.jit(do_not_specialize=["tokens"])
def count_kernel(bits_ptr, counts_ptr, tokens, WORDS: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """Counts the queries of the chunk that have chosen each token: int32 [tokens]."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    words = tl.load(
        bits_ptr + token[:, None] * WORDS + tl.arange(0, WORDS)[None, :], mask=inside[:, None], other=0
    )  # fmt: skip
    tl.store(counts_ptr + token, tl.sum(ones(words), 1), mask=inside)


@triton.jit(do_not_specialize=["first_row", "queries", "k_len", "choices"])
def place_kernel(
    lists_ptr, counts_ptr, bits_ptr,  # as in mark_kernel
    ends_ptr,  # int64 [pairs of the chunk * k_len]: the running sums of the results of count_kernel
    places_ptr,  # int32 [queries of the chunk, choices], written
    first_row, queries, k_len, choices, WORDS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Writes the places of one query's choices, -1 for entries that are none."""
    row = first_row + tl.program_id(0).to(tl.int64)
    pair, query = place_in_chunk(row, first_row, queries)
    word = tl.arange(0, WORDS)
    # The bits of this query and of all later ones.
    own = -1 << (query % 32).to(tl.int32)
    later = tl.where(word == query // 32, own, tl.where(word > query // 32, -1, 0)).to(tl.int32)
    for first in range(0, tl.load(counts_ptr + row), TOKENS):
        tokens = listed_tokens(lists_ptr + row * choices, first, choices, TOKENS)
        live = tokens < k_len
        token = pair * k_len + tl.where(live, tokens, 0)
        words = tl.load(bits_ptr + token[:, None] * WORDS + word[None, :])
        end = tl.load(ends_ptr + token)
        place = end - tl.sum(ones(words & later[None, :]), 1)
        at = first + tl.arange(0, TOKENS)
        tl.store(
            places_ptr + (row - first_row) * choices + at, tl.where(live, place, -1).to(tl.int32), mask=at < choices
        )
