import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, masks
from sparseflash.analysis import balance, bytes_moved, coarsening, density, flops, lint, reach
from sparseflash.analysis.order import live_tiles_in_order
from sparseflash.blockmask.stats import live_tokens
from tests.compared.portions import assert_same_in_portions
from tests.drawn.masks import block_masks, blocks

MASKS = st.tuples(st.integers(1, 3), st.integers(1, 3)).flatmap(lambda sizes: block_masks(160, (16, 32, 64), *sizes))


def in_tiles(mask, block_q, block_k):
    dense = mask.to_dense()
    q_pad, k_pad = -dense.shape[2] % block_q, -dense.shape[3] % block_k
    dense = torch.nn.functional.pad(dense, (0, k_pad, 0, q_pad))
    batch, heads, q_len, k_len = dense.shape
    return dense.view(batch, heads, q_len // block_q, block_q, k_len // block_k, block_k).sum((3, 5))


def walked(mask):
    patterns = mask.pattern.expand(mask.shape[:2])
    for b, (q_stop, k_stop) in enumerate(live_tokens(mask)):
        for h in range(mask.shape[1]):
            for i in range(min(mask.blocks[0], -(-q_stop // mask.block_q))):
                row = int(patterns[b, h]) * mask.blocks[0] + i
                for e in range(int(mask.indptr[row]), int(mask.indptr[row + 1])):
                    if int(mask.indices[e]) * mask.block_k < k_stop:
                        yield b, h, i, int(mask.indices[e]), int(mask.tile[e])


# ---------------------------------------------------------------------- density


@given(MASKS)
def test_density_counts_the_dense_matrix(mask):
    count, scores = in_tiles(mask, mask.block_q, mask.block_k), mask.block_q * mask.block_k
    found = density(mask)
    assert found.live_scores == int(mask.to_dense().sum())
    assert found.scores == mask.to_dense().numel()
    assert found.score_share == pytest.approx(mask.density)
    assert (found.tiles, found.live_tiles) == (count.numel(), int((count > 0).sum()))
    assert (found.full_tiles, found.partial_tiles) == (
        int((count == scores).sum()),
        int(((count > 0) & (count < scores)).sum()),
    )
    partial = count[(count > 0) & (count < scores)]
    assert found.partial_live_scores == int(partial.sum())
    assert found.partial_share == (pytest.approx(float(partial.double().mean()) / scores) if len(partial) else 1.0)
    assert found.tile_share == found.live_tiles / count.numel()


def test_density_of_no_batch_element_is_nothing():
    found = density(BlockMask.dense(64, block=32).with_lengths(torch.zeros(0, dtype=torch.int32)))
    assert (found.scores, found.live_scores, found.score_share, found.tile_share) == (0, 0, 0.0, 0.0)


# ---------------------------------------------------------------------- FLOPs


@given(MASKS, st.sampled_from([16, 24, 64]), st.none() | st.sampled_from([16, 32, 100]))
def test_flops_are_those_of_the_products(mask, dim, v_dim):
    dv = dim if v_dim is None else v_dim
    live, in_all = int(mask.to_dense().sum()), len(list(walked(mask))) * mask.block_q * mask.block_k
    forward, backward = flops(mask, dim, v_dim), flops(mask, dim, v_dim, backward=True)
    assert (forward.useful, forward.computed) == (2 * (dim + dv) * live, 2 * (dim + dv) * in_all)
    assert (backward.useful, backward.computed) == (2 * (3 * dim + 2 * dv) * live, 2 * (3 * dim + 2 * dv) * in_all)
    assert forward.efficiency == backward.efficiency == (forward.useful / forward.computed if in_all else 1.0)


def test_performed_flops_count_every_product_of_the_kernels_at_its_padded_size():
    mask = BlockMask.dense(256)
    scores = 2 * 256**2
    assert flops(mask, 80, 40).performed == scores * (128 + 64)
    assert flops(mask, 8).performed == scores * 32  # no product is narrower than 16
    assert flops(mask, 64, 32, backward=True).performed == scores * (4 * 64 + 3 * 32)
    assert flops(mask, 64, 32, backward=True, dtype=torch.float32).performed == scores * (5 * 64 + 4 * 32)


def test_a_shared_mask_counts_for_each_head():
    heads = torch.ones(3, 64, 64, dtype=torch.bool)
    heads[1].tril_()
    mask = BlockMask.from_dense(heads, block=16)
    assert flops(mask, 16, batch=5).useful == 5 * flops(mask, 16).useful
    assert flops(mask, 16, heads=3) == flops(mask, 16)
    assert bytes_moved(mask, 16, batch=5).total == 5 * bytes_moved(mask, 16).total


def test_a_batch_of_none_moves_nothing():
    mask = masks.causal(64, block=16).with_lengths([])
    assert bytes_moved(mask, 16, heads=2).total == 0 and str(bytes_moved(mask, 16, heads=2)) == "0 bytes"


@pytest.mark.parametrize("function", [flops, bytes_moved])
def test_sizes_that_do_not_fit_are_refused(function):
    mask = BlockMask.from_dense(torch.ones(3, 64, 64, dtype=torch.bool).tril(), block=16)
    two = BlockMask.from_dense(torch.stack([torch.ones(1, 64, 64).bool(), torch.eye(64).bool()[None]]), block=16)
    assert (mask.shape[1], two.shape[0]) == (3, 2)
    with pytest.raises(ValueError, match="heads must be 3, as in the mask; got 2"):
        function(mask, 64, heads=2)
    with pytest.raises(ValueError, match="batch must be 2, as in the mask; got 4"):
        function(two, 64, batch=4)
    with pytest.raises(ValueError, match="batch must be at least 1; got 0"):
        function(mask, 64, batch=0)
    with pytest.raises(ValueError, match="v_dim must be at least 1 channel; got 0"):
        function(mask, 64, 0)
    with pytest.raises(TypeError, match=r"head_dim must be an integer number of channels; got 64\.0"):
        function(mask, 64.0)


# ---------------------------------------------------------------------- traffic


@given(MASKS, st.sampled_from([16, 64]), st.sampled_from([16, 80]), st.sampled_from([16, 32, 64]))
def test_traffic_is_that_of_the_loop_walked_step_by_step(mask, dim, v_dim, held):
    held = min(held, mask.block_q)
    heads = mask.shape[0] * mask.shape[1]
    programs_a_head = -(-mask.q_len // held)
    keys = index = bits = 0
    for b, _, i, j, tile in walked(mask):
        first_key = j * mask.block_k
        for first_query in range(i * mask.block_q, min((i + 1) * mask.block_q, live_tokens(mask)[b][0]), held):
            assert first_query % held == 0
            keys += min(mask.block_k, mask.k_len - first_key)
            index += 8 if tile else 4
            bits += held * max(mask.block_k, 32) // 8 if tile else 0
    found = bytes_moved(mask, dim, v_dim, tile_queries=held)
    assert found.keys_values == 2 * (dim + v_dim) * keys
    assert found.index == index + 32 * heads * programs_a_head
    assert found.bits == bits
    assert found.queries == 2 * heads * mask.q_len * dim
    assert found.out == 2 * heads * mask.q_len * v_dim
    assert found.statistics == 4 * heads * mask.q_len
    assert found.total == sum((found.keys_values, found.index, found.bits, found.queries, found.out, found.statistics))
    assert found.tile_queries == held


def test_dense_traffic_is_the_same_loop_over_every_tile():
    mask = BlockMask.dense(1024, block=64)
    found = bytes_moved(mask, 64)
    assert found.total == found.dense_flash
    assert found.materialized == 2 * (4 * 1024 * 64 + 4 * 1024**2)


def test_traffic_falls_with_on_chip_memory_until_a_program_holds_its_block():
    mask = BlockMask.dense(4096, block=256)
    sizes = [bytes_moved(mask, 64, sram_bytes=kib * 1024) for kib in (16, 32, 64, 128, 256)]
    assert [entry.tile_queries for entry in sizes] == [16, 32, 128, 256, 256]
    assert [entry.keys_values * entry.tile_queries for entry in sizes] == [2 * 2 * 64 * 4096**2] * 5


def test_what_a_program_holds_fits_on_chip_and_twice_as_much_would_not():
    mask = BlockMask.dense(256, block=256)
    for dim in (16, 64, 128, 256):
        for kib in (48, 100, 163, 228):
            held = bytes_moved(mask, dim, sram_bytes=kib * 1024).tile_queries
            need = [m * 2 * dim + 4 * m * (dim + 2) + 64 * m + 64 * dim for m in (held, 2 * held)]
            assert need[0] <= kib * 1024
            assert held == 256 or need[1] > kib * 1024


def test_traffic_of_fp32_counts_four_bytes_and_what_the_backward_keeps():
    mask = masks.causal(300, block=64)
    half, single = (bytes_moved(mask, 32, dtype=dtype, tile_queries=64) for dtype in (torch.float16, torch.float32))
    assert (single.queries, single.keys_values, single.out) == (2 * half.queries, 2 * half.keys_values, 2 * half.out)
    assert (half.statistics, single.statistics) == (4 * 300, 12 * 300)
    assert (single.index, single.bits) == (half.index, half.bits)


def test_traffic_refuses_what_no_kernel_could_run():
    mask = BlockMask.dense(64, block=32)
    with pytest.raises(ValueError, match="sram_bytes must hold 16 queries and 16 keys, 11392 bytes; got 11391"):
        bytes_moved(mask, 64, sram_bytes=11391)
    assert bytes_moved(mask, 64, sram_bytes=11392).tile_queries == 16
    for held in (8, 24, 64):
        with pytest.raises(ValueError, match=rf"power of two from 16 to the mask's block_q \(32\); got {held}"):
            bytes_moved(mask, 64, tile_queries=held)
    with pytest.raises(TypeError, match=r"dtype must be a floating-point type; got torch\.int32"):
        bytes_moved(mask, 64, dtype=torch.int32)


def test_what_is_no_dtype_and_no_flag_is_refused():
    mask = BlockMask.dense(64, block=32)
    for count in (bytes_moved, flops):
        with pytest.raises(TypeError, match="dtype must be a floating-point type; got 'bf16'"):
            count(mask, 64, dtype="bf16")
    with pytest.raises(TypeError, match="backward must be True or False; got 'no'"):
        flops(mask, 64, backward="no")


# ---------------------------------------------------------------------- balance


@given(MASKS)
def test_balance_counts_rows_and_columns_of_the_dense_matrix(mask):
    count = in_tiles(mask, mask.block_q, mask.block_k)
    found = balance(mask)
    users = [user for entry in found for user in entry.users]
    assert sorted(users) == [(b, h) for b in range(mask.shape[0]) for h in range(mask.shape[1])]
    for entry in found:
        for b, h in entry.users:
            rows, cols = (
                -(-stop // block)
                for stop, block in zip(live_tokens(mask)[b], (mask.block_q, mask.block_k), strict=True)
            )
            here = count[b, h, :rows, :cols]
            for load, axis, length in ((entry.rows, 1, rows), (entry.columns, 0, cols)):
                tiles, scores = (here > 0).sum(axis), here.sum(axis)
                for spread, values in ((load.tiles, tiles), (load.scores, scores)):
                    if not length:
                        assert (spread.least, spread.mean, spread.most, load.empty) == (0, 0.0, 0, 0.0)
                        continue
                    assert (spread.least, spread.most) == (int(values.min()), int(values.max()))
                    assert spread.mean == pytest.approx(float(values.double().mean()))
                if length:
                    assert load.empty == pytest.approx(float((tiles == 0).double().mean()))


def test_causal_rows_are_up_to_twice_the_mean():
    (found,) = balance(masks.causal(128 * 99, block=128))
    assert found.rows.tiles.ratio == found.columns.tiles.ratio == 99 / 50
    assert balance(BlockMask.from_tiles(torch.arange(0), torch.arange(0), 64))[0].rows.tiles.ratio == 1.0


def test_heads_with_one_pattern_share_an_entry():
    heads = torch.stack([torch.ones(64, 64).bool(), torch.eye(64).bool(), torch.ones(64, 64).bool()])
    first, second = balance(BlockMask.from_dense(heads, block=16))
    assert (first.users, second.users) == (((0, 0), (0, 2)), ((0, 1),))


# ---------------------------------------------------------------------- coarsening


@given(MASKS, st.lists(blocks((16, 32, 64, 128, 256)), min_size=1, max_size=4))
def test_coarsening_counts_the_tiles_of_any_other_block(mask, others):
    found = coarsening(mask, others)
    live = int(mask.to_dense().sum())
    for (block_q, block_k), entry in zip(others, found, strict=True):
        assert (entry.block_q, entry.block_k, entry.live_scores) == (block_q, block_k, live)
        assert entry.live_tiles == int((in_tiles(mask, block_q, block_k) > 0).sum())
        assert entry.computed_scores == entry.live_tiles * block_q * block_k
        assert entry.over_coverage == (entry.computed_scores / live if live else 1.0)


def test_coarsening_of_its_own_block_is_the_mask():
    mask = masks.local(1000, window=65, block=64)
    (own,) = coarsening(mask, [64])
    assert own.live_tiles == len(mask.indices)
    assert [entry.block_q for entry in coarsening(mask)] == [16, 32, 64, 128, 256]
    with pytest.raises(ValueError, match="block must be one of 16, 32, 64, 128, 256"):
        coarsening(mask, [48])


def random_mask(block=(16, 16), length=130):
    generator = torch.Generator().manual_seed(0)
    live = torch.rand(1, 2, length, length, generator=generator) < 0.02
    live[:, :, :64, :32] = True
    live |= torch.eye(length, dtype=torch.bool).roll(1, 0)
    return BlockMask.from_dense(live, block=block).with_lengths([length, length - 30])


SHUFFLED = torch.randperm(130, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("module", "name", "make"),
    [
        ("coarsening", "SCORES_AT_ONCE", lambda: coarsening(random_mask())),
        ("composition", "SCORES_AT_ONCE", lambda: reach(random_mask(), 3)),
        ("composition", "TARGETS_AT_ONCE", lambda: reach(random_mask(), 3)),
        ("composition", "_BITS_AT_ONCE", lambda: reach(random_mask(), 3)),
        ("connectivity", "SCORES_AT_ONCE", lambda: list(map(str, lint(random_mask(), causal=True)))),
        ("order", "SCORES_AT_ONCE", lambda: live_tiles_in_order(random_mask(), SHUFFLED)),
        ("relation", "SCORES_AT_ONCE", lambda: reach(random_mask((32, 64)), 2)),
        ("relation", "TARGETS_AT_ONCE", lambda: reach(random_mask((32, 64)), 2)),
        ("tokens", "SCORES_AT_ONCE", lambda: list(map(str, lint(random_mask(), causal=True)))),
        ("tokens", "_TILES_AT_ONCE", lambda: list(map(str, lint(random_mask(), causal=True)))),
    ],
    ids=lambda given: None if callable(given) else given,
)
def test_counts_are_the_same_in_portions(module, name, make):
    assert_same_in_portions(make, f"sparseflash.analysis.{module}", name)
