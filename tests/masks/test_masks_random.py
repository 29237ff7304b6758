import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, masks
from sparseflash.masks.tiling.draws import generator, subsets
from tests.drawn.masks import SEEDS, lengths

MOST_BLOCKS = 14
RANDOM = pytest.mark.parametrize(
    "build",
    [
        lambda q_len, **options: masks.bigbird(q_len, random_blocks=1, **options),
        lambda q_len, **options: masks.deepspeed_bigbird(q_len, random_blocks=1, **options),
        lambda q_len, **options: masks.random_blocks(q_len, count=1, **options),
        lambda q_len, **options: masks.expander(q_len, degree=2, **options),
    ],
    ids=["bigbird", "deepspeed_bigbird", "random_blocks", "expander"],
)


@st.composite
def sizes(draw):
    block = draw(st.sampled_from([16, 32]))
    q_len = draw(lengths(MOST_BLOCKS * block, block))
    return q_len, block, -(-q_len // block), draw(st.integers(1, 3)), draw(SEEDS)


def layouts_of(mask):
    """The live tiles of each head, `[H, nb, nb]`; all tiles must be full but at ends."""
    mask.validate()
    block, nb = mask.block_q, mask.blocks[0]
    dense = torch.zeros(mask.shape[1], nb * block, nb * block, dtype=torch.bool)
    dense[:, : mask.q_len, : mask.k_len] = mask.to_dense()[0]
    return dense.reshape(-1, nb, block, nb, block).transpose(2, 3).any(-1).any(-1)


def assert_full_tiles(mask, causal=False):
    dense = layouts_of(mask).repeat_interleave(mask.block_q, 1).repeat_interleave(mask.block_q, 2)
    dense = dense[:, : mask.q_len, : mask.q_len]
    assert mask == BlockMask.from_dense(dense.tril() if causal else dense, block=mask.block_q)


def block_grid(nb):
    return torch.arange(nb)[:, None], torch.arange(nb)[None, :]


# ---------------------------------------------------------------------- the four patterns


@given(sizes(), st.integers(0, 6))
def test_bigbird_is_window_global_and_as_many_random_blocks_elsewhere(drawn, random_blocks):
    q_len, block, nb, heads, seed = drawn
    random_blocks = min(random_blocks, max(nb - 5, 0))
    mask = masks.bigbird(q_len, random_blocks=random_blocks, heads=heads, seed=seed, block=block)
    assert_full_tiles(mask)
    i, j = block_grid(nb)
    fixed = ((i - j).abs() <= 1) | (i == 0) | (i == nb - 1) | (j == 0) | (j == nb - 1)
    for layout in layouts_of(mask):
        assert layout[fixed].all()
        assert ((layout & ~fixed).sum(1)[1:-1] == random_blocks).all()
        if nb > 3:
            drawn_by = layout & ~fixed
            assert not drawn_by[1, nb - 2] and not drawn_by[nb - 2, 1]


@given(sizes(), st.integers(0, 5), st.integers(0, 9), st.integers(0, 4), st.booleans())
def test_deepspeed_bigbird_is_window_first_blocks_and_random_blocks(drawn, random, window, first, causal):
    q_len, block, nb, heads, seed = drawn
    random, window, first = (min(value, nb) for value in (random, window, first))
    mask = masks.deepspeed_bigbird(
        q_len,
        random_blocks=random,
        window_blocks=window,
        global_blocks=first,
        heads=heads,
        causal=causal,
        seed=seed,
        block=block,
    )
    assert_full_tiles(mask, causal)
    i, j = block_grid(nb)
    fixed = ((i - j).abs() <= window // 2) | (i < first) | (j < first)
    allowed = (j <= i) if causal else torch.ones(nb, nb, dtype=torch.bool)
    for layout in layouts_of(mask):
        assert layout[fixed & allowed].all() and not layout[~allowed].any()
        assert ((layout & ~fixed).sum(1) <= random).all()
    if random == nb:
        assert (layouts_of(mask) == allowed).all()


@given(sizes(), st.integers(0, MOST_BLOCKS + 2), st.booleans())
def test_random_blocks_sees_itself_and_as_many_others(drawn, count, causal):
    q_len, block, nb, heads, seed = drawn
    mask = masks.random_blocks(q_len, count=count, heads=heads, causal=causal, seed=seed, block=block)
    assert_full_tiles(mask, causal)
    for layout in layouts_of(mask):
        assert layout.diagonal().all()
        others = torch.arange(nb) if causal else torch.full((nb,), nb - 1)
        assert torch.equal(layout.sum(1), others.clamp(max=count) + 1)


@given(sizes(), st.integers(0, 4))
def test_expander_is_a_union_of_cycles(drawn, cycles):
    q_len, block, nb, heads, seed = drawn
    mask = masks.expander(q_len, degree=2 * cycles, heads=heads, seed=seed, block=block)
    assert_full_tiles(mask)
    for layout in layouts_of(mask):
        assert layout.diagonal().all() and torch.equal(layout, layout.T)
        neighbours = layout.sum(1) - 1
        assert (neighbours <= 2 * cycles).all()
        if cycles == 1 and nb > 2:
            assert (neighbours == 2).all()
        if cycles:
            reach = torch.linalg.matrix_power(layout.double(), nb) > 0
            assert reach.all()


@pytest.mark.parametrize("degree", [4, 6, 8])
def test_expander_has_the_spectral_gap_of_a_random_regular_graph(degree):
    for seed in range(5):
        adjacency = layouts_of(masks.expander(16 * 256, degree=degree, seed=seed, block=16))[0].double() - torch.eye(
            256
        )
        second = torch.linalg.eigvalsh(adjacency)[-2]
        assert second <= 2 * math.sqrt(degree - 1) + 0.1


@given(st.integers(1, 30), st.integers(0, 6), SEEDS)
def test_causal_random_patterns_never_see_the_future(blocks, count, seed):
    for mask in (
        masks.random_blocks(16 * blocks, count=count, causal=True, seed=seed, block=16),
        masks.deepspeed_bigbird(
            16 * blocks,
            random_blocks=min(count, blocks),
            window_blocks=min(3, blocks),
            global_blocks=1,
            causal=True,
            seed=seed,
            block=16,
        ),
    ):
        assert not mask.to_dense().triu(1).any()
        assert mask.to_dense()[0, 0].diagonal().all()


@RANDOM
def test_a_seed_is_a_mask(build):
    one = build(16 * 40, heads=3, seed=7, block=16)
    assert one == build(16 * 40, heads=3, seed=7, block=16)
    assert one != build(16 * 40, heads=3, seed=8, block=16)
    assert build(16 * 40, block=16) == build(16 * 40, seed=0, block=16)


@RANDOM
def test_heads_draw_for_themselves(build):
    mask = build(16 * 40, heads=4, block=16)
    assert mask.pattern.tolist() == [[0, 1, 2, 3]]
    assert build(16 * 40, block=16).pattern.tolist() == [[0]]
    first = build(16 * 40, heads=1, block=16).to_dense()[0, 0]
    assert torch.equal(first, mask.to_dense()[0, 0])


PINNED = {
    "bigbird": ["X..XXXXX.X", "XXX.XXX..X", "XX...XXXXX"],
    "deepspeed": ["X.XXXX....", "XX..XXX...", "X....XXX.."],
    "causal": ["X.XXX.....", "XX..XX....", "X....XX..."],
    "random": ["X.X.X...X.", ".XXX.X....", "....XXX.X."],
    "expander": ["X..XX..XX.", "..X..XXX.X", "...X.XX.XX"],
}


def test_seeds_give_the_same_masks_on_every_machine():
    rows = slice(4, 7)
    pinned = {
        "bigbird": masks.bigbird(160, random_blocks=2, seed=1, block=16),
        "deepspeed": masks.deepspeed_bigbird(160, random_blocks=2, seed=1, block=16),
        "causal": masks.deepspeed_bigbird(160, random_blocks=2, causal=True, seed=1, block=16),
        "random": masks.random_blocks(160, count=3, seed=1, block=16),
        "expander": masks.expander(160, degree=4, seed=1, block=16),
    }
    seen = {
        name: ["".join("X" if live else "." for live in row) for row in layouts_of(mask)[0][rows]]
        for name, mask in pinned.items()
    }
    assert seen == PINNED


# ---------------------------------------------------------------------- the draw


@given(st.lists(st.integers(0, 12), max_size=8), st.integers(0, 14), SEEDS)
def test_subsets_are_distinct_numbers_below_each_size(bounds, count, seed):
    rows, picks = subsets(generator(seed), np.array(bounds, dtype=np.int64), count)
    for row, size in enumerate(bounds):
        mine = picks[rows == row].tolist()
        assert len(mine) == len(set(mine)) == min(count, size)
        assert all(0 <= pick < size for pick in mine)


def test_every_subset_is_as_likely():
    draws = 20_000
    _, picks = subsets(generator(0), np.full(draws, 5), 2)
    pairs = np.sort(picks.reshape(draws, 2), axis=1)
    _, counts = np.unique(pairs[:, 0] * 5 + pairs[:, 1], return_counts=True)
    assert len(counts) == 10
    assert (np.abs(counts - draws / 10) < 5 * math.sqrt(draws / 10)).all()


# ---------------------------------------------------------------------- cost


@pytest.mark.parametrize("heads", [1, 4])
def test_a_million_tokens_store_only_their_live_tiles(heads):
    blocks = 2**20 // 128
    mask = masks.bigbird(2**20, random_blocks=3, heads=heads, block=128)
    assert len(mask.indices) == heads * (8 * (blocks - 2) - 2 + 2 * blocks)


# ---------------------------------------------------------------------- errors


@RANDOM
def test_random_patterns_refuse_what_is_none(build):
    with pytest.raises(
        TypeError, match=r"block must be an int \((BigBird|expander|random) blocks are square\); got \(16, 32\)"
    ):
        build(1024, block=(16, 32))
    with pytest.raises(ValueError, match="block must be one of"):
        build(1024, block=24)
    with pytest.raises(ValueError, match="q_len must be between 1 and"):
        build(0, block=16)
    for seed, error in ((-1, "at least 0; got -1"), (1.5, "an integer; got 1.5"), (None, "an integer; got None")):
        with pytest.raises((TypeError, ValueError), match=f"seed must be {error}"):
            build(1024, seed=seed, block=16)
    for heads, error in ((0, ValueError), (-2, ValueError), (2.0, TypeError)):
        with pytest.raises(error, match="heads must be"):
            build(1024, heads=heads, block=16)


@pytest.mark.parametrize("n", [1, 2, 127, 128, 129, 256, 257, 384, 640, 896, 897, 1024, 1025])
def test_the_defaults_make_a_mask_of_any_length(n):
    blocks = -(-n // 128)
    found = masks.bigbird(n)
    assert found == masks.bigbird(n, random_blocks=min(3, max(0, blocks - 5)))
    assert (found == masks.dense(n)) == (blocks <= 4)
    assert masks.deepspeed_bigbird(n) == masks.deepspeed_bigbird(n, window_blocks=min(3, blocks))
    assert masks.deepspeed_bigbird(n).density == 1 or blocks > 3


WITHOUT_ARGUMENTS = [
    name for name, found in vars(masks).items()
    if callable(found) and name in masks.__all__ and [
        each.name for each in inspect.signature(found).parameters.values() if each.default is each.empty
    ] == ["q_len"] and name != "local"  # it must have a window
]  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_ARGUMENTS)
def test_every_pattern_that_needs_no_more_takes_every_length(name):
    assert {"bigbird", "butterfly", "causal", "deepspeed_bigbird"} <= set(WITHOUT_ARGUMENTS)
    for n in (*range(1, 2001, 37), 2000):
        assert getattr(masks, name)(n).shape[-2:] == (n, n)


@pytest.mark.parametrize(("blocks", "most"), [(1, 0), (4, 0), (5, 0), (6, 1), (12, 7)])
def test_bigbird_refuses_more_random_blocks_than_there_are(blocks, most):
    masks.bigbird(16 * blocks, random_blocks=most, block=16)
    message = f"random_blocks must not exceed {most} .* for {blocks} blocks of 16; got {most + 1}. Leave it out, or"
    with pytest.raises(ValueError, match=message):
        masks.bigbird(16 * blocks, random_blocks=most + 1, block=16)
    with pytest.raises(ValueError, match="random_blocks must be at least 0 blocks; got -1"):
        masks.bigbird(16 * blocks, random_blocks=-1, block=16)


@pytest.mark.parametrize("name", ["random_blocks", "window_blocks", "global_blocks"])
def test_deepspeed_bigbird_refuses_more_blocks_than_there_are(name):
    small = {"random_blocks": 0, "window_blocks": 0, "global_blocks": 0}
    masks.deepspeed_bigbird(64, **small | {name: 4}, block=16)
    with pytest.raises(
        ValueError, match=f"{name} must not exceed the 4 blocks of 16 tokens; got 5. Pass fewer, or choose a"
    ):
        masks.deepspeed_bigbird(64, **small | {name: 5}, block=16)
    with pytest.raises(ValueError, match=f"{name} must be at least 0 blocks; got -1"):
        masks.deepspeed_bigbird(64, **small | {name: -1}, block=16)


def test_random_blocks_refuses_a_count_that_is_none():
    with pytest.raises(ValueError, match="count must be at least 0 blocks; got -1"):
        masks.random_blocks(100, count=-1)
    with pytest.raises(TypeError, match=r"count must be an integer number of blocks; got 1\.5"):
        masks.random_blocks(100, count=1.5)


def test_expander_refuses_an_odd_degree():
    with pytest.raises(ValueError, match=r"degree must be even \(each cycle gives a block two neighbours\); got 3"):
        masks.expander(100, degree=3)
    with pytest.raises(ValueError, match="degree must be at least 0 blocks; got -2"):
        masks.expander(100, degree=-2)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("tokens", [5, 40, 100])
def test_an_expander_of_any_degree_ends_with_the_complete_graph(tokens):
    mask = masks.expander(tokens, degree=2**70, heads=2, block=16)
    assert mask == masks.per_head([BlockMask.dense(tokens, block=16)] * 2)
