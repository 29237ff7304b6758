import re

import pytest
import torch

from sparseflash import BlockMask, attention, decode, limits, scores
from sparseflash.blockmask.build import arrays_of_tiles
from sparseflash.blockmask.csr import columns_of
from sparseflash.masks.block_index import _compacted
from sparseflash.masks.tiling.chosen import compact
from sparseflash.scores.change import Sizes

MOST = 2**31 - 257


def ints(*shape, device="meta"):
    return torch.empty(shape, dtype=torch.int32, device=device)


def test_counts_up_to_the_limit_are_taken_and_the_next_is_not():
    limits.check_count("tiles", 2**31 - 1, remedy="Use larger blocks.")
    limits.check_count("tiles", 2**16, 2**15 - 1, remedy="Use larger blocks.")
    for factors in ((2**31,), (2**16, 2**15), (2**40, 2**40)):
        with pytest.raises(ValueError, match=r"^tiles must be below 2\^31; got [\dx ]+\. Use larger blocks\.$"):
            limits.check_count("tiles", *factors, remedy="Use larger blocks.")
    limits.check_tokens(MOST, "q_len")
    for length in (0, MOST + 1):
        with pytest.raises(ValueError, match=rf"q_len must be between 1 and 2\^31 - 257 tokens; got {length}\."):
            limits.check_tokens(length, "q_len")


@pytest.mark.parametrize("name", ["tiles", "block rows", "distinct partial tiles"])
def test_arrays_of_a_mask_are_counted(name):
    nnz, rows, bits = (2**31 if each == name else 2 for each in ("tiles", "block rows", "distinct partial tiles"))
    with pytest.raises(ValueError, match=rf"{name} of a mask must be below 2\^31; got 2147483648\. Use larger blocks"):
        BlockMask(16, 16, 16, 16, ints(rows), ints(nnz), ints(nnz), ints(bits, 16, 1), ints(1, 1))


def test_patterns_times_block_rows_are_counted_before_arrays_are_made():
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"patterns x block rows must be below 2\^31; got 17 x 134217712"):
        arrays_of_tiles(MOST, 16, 16, 16, one, one, one, ints(0, 16, 1, device="cpu"), one.view(1, 1), 17)
    with pytest.raises(ValueError, match=r"tiles of a mask must be below 2\^31; got 2147483648\. Use larger blocks"):
        arrays_of_tiles(16, 16, 16, 16, *[ints(2**31)] * 3, ints(0, 16, 1), one.view(1, 1), 1)


def test_patterns_times_block_columns_are_counted():
    indptr = torch.arange(18, dtype=torch.int32).clamp(max=1)
    with pytest.raises(ValueError, match=r"patterns x block columns must be below 2\^31; got 17 x 134217712"):
        columns_of(indptr, ints(1, device="cpu"), ints(1, device="cpu"), 1, 134217712)


@pytest.mark.parametrize("made", [compact, lambda kept, room: _compacted(kept, kept, kept, room)])
def test_room_for_chosen_tiles_is_counted(made):
    kept = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(
        ValueError, match=r"the room for tiles of a mask must be below 2\^31; got 2147483648\. Use larg"
    ):
        made(kept, 2**31)


def test_tables_of_more_offsets_than_numbers_of_32_bits_are_refused():
    sizes = Sizes(1, 2, 2**30, 2**30, torch.device("meta"))
    with pytest.raises(ValueError, match=r"at most 2\^31 - 257 tokens together.*got 1073741824 and 1073741824"):
        scores.relative(torch.zeros(2, 9, device="meta"), scores.clipped(4)).prepared(sizes)
    table = torch.zeros(1, device="meta").expand(2, 2 * 32768 - 1, 2 * 32768 - 1)
    with pytest.raises(ValueError, match=r"entries of a table must be below 2\^31; got 65535 x 65535"):
        scores.relative_2d(table, 32768, 32768).prepared(Sizes(1, 2, 2**30, 2**30, torch.device("meta")))


def test_sequences_of_more_tokens_than_kernels_count_are_refused_without_a_mask_too():
    q = torch.zeros(1, 1, 1, 16)
    for long in (2**31 - 256, 2**31, 2**40):
        k = q.expand(1, 1, long, 16)
        message = rf"the length of k must be between 1 and 2\^31 - 257 tokens; got {long}\."
        with pytest.raises(ValueError, match=message):
            attention(q, k, k, backend="triton")


def cache(page=16):
    return torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, page, 16)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_caches_with_room_for_more_tokens_than_kernels_count_are_refused(backend):
    q, pages = cache(4096)
    table = torch.zeros(1, 1, dtype=torch.int32).expand(1, 2**20)
    message = r"the cache capacity of a sequence must be between 1 and 2\^31 - 257 tokens; got 4294967296"
    with pytest.raises(ValueError, match=message):
        decode.attention_with_cache(q, pages, pages, torch.tensor([3]), block_table=table, backend=backend)
    long = pages[:, :, :1].expand(1, 1, 2**31, 16)
    with pytest.raises(ValueError, match=r"the cache capacity of a sequence must be .* got 2147483648"):
        decode.attention_with_cache(q, long, long, torch.tensor([3]), window=4, backend=backend)


def test_more_chosen_pages_than_kernels_count_are_refused():
    q, k = cache(2**15)
    pages = torch.zeros(1, 1, 1, dtype=torch.int32).expand(1, 1, 2**17)
    with pytest.raises(
        ValueError, match=re.escape("chosen pages x their tokens must be below 2^31; got 131072 x 16384")
    ):
        decode.attention_with_cache(q, k, k, torch.tensor([3]), pages=pages, page=2**14, backend="triton")


def test_more_programs_than_kernels_count_are_refused():
    q = torch.zeros(1, 1, 1, 16).expand(2**14, 2**10, 1, 16)
    k = torch.zeros(1, 1, 1, 16).expand(2**14, 2**10, 128, 16)
    lengths = torch.ones(1, dtype=torch.int32).expand(2**14)
    with pytest.raises(
        ValueError, match=r"batch x heads x tiles of rows x splits must be below 2\^31; got 16384 x 1024"
    ):
        decode.attention_with_cache(q, k, k, lengths, splits=128, backend="triton")
