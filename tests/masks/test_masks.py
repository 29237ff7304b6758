import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sparseflash import BlockMask, masks
from sparseflash.masks.tiling.band import band
from tests.drawn.masks import blocks, lengths
from tests.masks.mask_rules import BLOCKS, assert_keeps, grid

MOST = 200
SEVERAL = pytest.mark.parametrize(
    "build",
    [masks.causal, lambda q_len, **block: masks.local(q_len, window=5, **block), masks.butterfly],
    ids=["causal", "local", "butterfly"],
)


# ---------------------------------------------------------------------- causal, local, band


@given(lengths(MOST), lengths(MOST), blocks(BLOCKS))
def test_causal_lets_the_last_query_see_the_last_key(q_len, k_len, block):
    q, k = grid(q_len, k_len)
    assert_keeps(masks.causal(q_len, k_len, block=block), k <= q + (k_len - q_len))


@given(lengths(MOST), blocks(BLOCKS))
def test_causal_has_as_many_keys_as_queries_by_default(length, block):
    assert masks.causal(length, block=block) == masks.causal(length, length, block=block)


@given(lengths(MOST), lengths(2 * MOST), blocks(BLOCKS))
def test_causal_window_counts_the_keys_a_query_sees(q_len, window, block):
    q, k = grid(q_len, q_len)
    mask = masks.local(q_len, window=window, causal=True, block=block)
    assert_keeps(mask, (q - window < k) & (k <= q))
    assert mask.to_dense()[0, 0].sum(1).tolist() == [min(i + 1, window) for i in range(q_len)]


@given(lengths(MOST), lengths(2 * MOST), blocks(BLOCKS))
def test_bidirectional_window_reaches_half_of_it_to_each_side(q_len, window, block):
    q, k = grid(q_len, q_len)
    assert_keeps(masks.local(q_len, window=window, block=block), (q - k).abs() <= window // 2)


@given(
    lengths(MOST),
    lengths(MOST),
    st.integers(-2 * MOST, 2 * MOST),
    st.none() | st.integers(-2 * MOST, 2 * MOST),
    st.integers(-MOST, MOST),
    blocks(BLOCKS),
)
def test_band_keeps_an_interval_of_distances(q_len, k_len, lowest, highest, shift, block):
    q, k = grid(q_len, k_len)
    distance = q + shift - k
    live = (distance >= lowest) & (distance <= (torch.inf if highest is None else highest))
    assert_keeps(band(q_len, k_len, lowest, highest, shift=shift, block=block), live)


@pytest.mark.parametrize("block", [(16, 16), (16, 32), (32, 16)], ids=str)
@pytest.mark.parametrize(("q_len", "k_len"), [(70, 70), (64, 96), (80, 37)])
def test_band_keeps_the_right_scores_wherever_its_edges_cut_the_tiles(q_len, k_len, block):
    q, k = grid(q_len, k_len)
    for lowest in range(-40, 40):
        for width, shift in ((0, 0), (11, -50), (block[0] + block[1] - 2, 50), (90, -13)):
            highest = lowest + width
            mask = band(q_len, k_len, lowest, highest, shift=shift, block=block)
            live = (lowest <= q + shift - k) & (q + shift - k <= highest)
            assert torch.equal(mask.to_dense()[0, 0], live), (lowest, highest, shift)


# ---------------------------------------------------------------------- butterfly


def is_power_of_two(x):
    return (x > 0) & ((x & (x - 1)) == 0)


def ceil_log2(count):
    return next(power for power in range(64) if 2**power >= count)


@st.composite
def butterflies(draw):
    block = draw(st.sampled_from([16, 32]))
    q_len = draw(lengths(17 * block, block))
    return q_len, block, draw(st.none() | st.integers(0, ceil_log2(-(-q_len // block))))


@given(butterflies())
def test_butterfly_sees_the_blocks_one_bit_away(drawn):
    q_len, block, factors = drawn
    q, k = grid(q_len, q_len)
    stride = (q // block) ^ (k // block)
    limit = 1 << (62 if factors is None else factors)
    live = (stride == 0) | (is_power_of_two(stride) & (stride < limit))
    assert_keeps(masks.butterfly(q_len, block=block, factors=factors), live)


@given(butterflies())
def test_causal_butterfly_sees_the_blocks_a_power_of_two_back(drawn):
    q_len, block, factors = drawn
    q, k = grid(q_len, q_len)
    stride = q // block - k // block
    limit = 1 << (62 if factors is None else factors)
    live = ((stride == 0) & (k <= q)) | (is_power_of_two(stride) & (stride < limit))
    assert_keeps(masks.butterfly(q_len, block=block, factors=factors, causal=True), live)


def reached(mask, layers):
    size = mask.blocks[0]
    layout = torch.zeros(size, size, dtype=torch.bool)
    rows = torch.repeat_interleave(torch.arange(size), mask.indptr.diff().long())
    layout[rows, mask.indices.long()] = True
    reach = torch.eye(size, dtype=torch.bool)
    for _ in range(layers):
        reach = (reach.float() @ layout.float()) > 0
    return reach


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 16, 37, 64, 100])
def test_butterfly_reaches_every_block_in_log2_layers_and_no_sooner(count):
    mask, layers = masks.butterfly(16 * count, block=16), ceil_log2(count)
    assert reached(mask, layers).all()
    if count & (count - 1) == 0 and count > 1:
        assert not reached(mask, layers - 1).all()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 16, 37, 64, 100])
def test_causal_butterfly_reaches_every_past_block_in_log2_layers(count):
    reach = reached(masks.butterfly(16 * count, block=16, causal=True), ceil_log2(count))
    assert torch.equal(reach, torch.ones(count, count, dtype=torch.bool).tril())


def test_the_lower_triangle_of_the_xor_form_would_not_reach_the_past():
    triangle = masks.butterfly(16 * 8, block=16).to_dense()[0, 0].tril()
    reach = reached(BlockMask.from_dense(triangle, block=16), 20)
    assert not reach[4, 3] and not reach[6, 5]


# ---------------------------------------------------------------------- cost


@pytest.mark.parametrize("causal", [False, True])
def test_stored_bits_do_not_grow_with_the_length(causal):
    for build in (
        lambda n: masks.local(n, window=300, causal=causal, block=64),
        lambda n: masks.butterfly(n, causal=causal),
    ):
        assert torch.equal(build(2**13).bits, build(2**16).bits)


# ---------------------------------------------------------------------- errors


@SEVERAL
@pytest.mark.parametrize("block", [0, -16, 8, 100, 512, None, "16", [32, 32], (16,), (16, 32, 64)], ids=str)
def test_builders_refuse_a_block_that_is_none(build, block):
    with pytest.raises((TypeError, ValueError), match=r"block must be"):
        build(100, block=block)


@SEVERAL
@pytest.mark.parametrize("length", [0, -1, -100, 2**31])
def test_builders_refuse_lengths_out_of_range(build, length):
    with pytest.raises(ValueError, match=rf"q_len must be between 1 and 2\^31 - 257 tokens; got {length}"):
        build(length, block=16)


@SEVERAL
@pytest.mark.parametrize("length", [1.5, 64.0, "64", None, True])
def test_builders_refuse_lengths_that_are_no_integers(build, length):
    with pytest.raises(TypeError, match="q_len must be an integer number of tokens; got"):
        build(length, block=16)


@pytest.mark.parametrize("k_len", [0, -3])
def test_causal_refuses_an_empty_context(k_len):
    with pytest.raises(ValueError, match="k_len must be between 1 and"):
        masks.causal(4, k_len)


@pytest.mark.parametrize("window", [0, -1])
def test_local_refuses_an_empty_window(window):
    with pytest.raises(ValueError, match=f"window must be at least 1 key; got {window}"):
        masks.local(100, window=window)


@pytest.mark.parametrize("window", [2.5, 2.0, "3"])
def test_local_refuses_a_window_that_is_no_integer(window):
    with pytest.raises(TypeError, match="window must be an integer number of keys; got"):
        masks.local(100, window=window)


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += 1
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize(
    "build",
    [
        lambda: masks.causal(256),
        lambda: masks.causal(1000),
        lambda: masks.causal(1, 4096),
        lambda: masks.local(4096, window=256, causal=True),
        lambda: masks.local(1, 4096, window=256),
        lambda: masks.dense(1, 4096),
    ],
)
def test_a_short_list_of_tiles_takes_few_operations_of_pytorch(build):
    """Their number is the host's time for a mask that is built at every step."""
    with Operations() as operations:
        build()
    assert operations.count <= 40


def test_square_blocks_may_be_integers_of_numpy():
    assert masks.butterfly(1000, block=np.int64(64)) == masks.butterfly(1000, block=64)
    assert masks.random_blocks(1000, count=2, block=np.int32(64)) == masks.random_blocks(1000, count=2, block=64)


def test_numbers_of_blocks_may_be_tensors():
    three = torch.tensor(3)
    assert masks.bigbird(1000, random_blocks=three, block=64) == masks.bigbird(1000, random_blocks=3, block=64)
    numbers = {"random_blocks": 3, "window_blocks": 3, "global_blocks": 3}
    assert masks.deepspeed_bigbird(1000, block=64, **dict.fromkeys(numbers, three)) == masks.deepspeed_bigbird(
        1000, block=64, **numbers
    )


def test_butterfly_refuses_rectangular_blocks():
    with pytest.raises(TypeError, match=r"block must be an int \(butterfly blocks are square\); got \(16, 32\)"):
        masks.butterfly(100, block=(16, 32))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("count", "most"), [(1, 0), (2, 1), (7, 3), (8, 3), (9, 4)])
def test_butterfly_refuses_factors_that_its_blocks_do_not_have(count, most, causal):
    for factors in (-1, most + 1):
        message = f"factors must lie between 0 and {most} for {count} blocks of 16; got {factors}"
        with pytest.raises(ValueError, match=message):
            masks.butterfly(16 * count, block=16, factors=factors, causal=causal)
    assert masks.butterfly(16 * count, block=16, factors=most, causal=causal) == masks.butterfly(
        16 * count, block=16, causal=causal
    )


def test_butterfly_refuses_factors_that_are_no_integer():
    with pytest.raises(TypeError, match=r"factors must be an integer number of strides; got 1\.5"):
        masks.butterfly(100, block=16, factors=1.5)
