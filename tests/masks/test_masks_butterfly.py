import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash import masks
from tests.drawn.masks import blocks
from tests.masks.mask_rules import assert_keeps
from tests.masks.sequence_sizes import reached, square


def digits(x, radix):
    return torch.stack([x // radix**n % radix for n in range(12)], -1)


def one_stride_away(i, j, radix, strides, causal):
    found = torch.zeros(torch.broadcast_shapes(i.shape, j.shape), dtype=torch.bool)
    for stride in strides:
        if causal:
            found |= torch.isin(i - j, torch.arange(1, radix) * stride)
        else:
            differ = digits(i, radix) != digits(j, radix)
            at = next(n for n in range(12) if radix**n == stride)
            found |= differ[..., at] & (differ.sum(-1) == 1)
    return found


@given(st.integers(1, 40), st.integers(0, 15), st.integers(2, 6), st.booleans(), st.data())
def test_butterfly_of_any_radix_strides_global_blocks_and_layer(count, missing, radix, causal, data):
    q_len = 16 * count - missing
    there = [radix**n for n in range(6) if radix**n < count]
    strides = data.draw(st.lists(st.sampled_from(there), max_size=4)) if there else []
    global_blocks = data.draw(st.integers(0, 2) | st.just(count + 1))
    layer = data.draw(st.none() | st.integers(0, 7))
    q, k = square(q_len)
    i, j = q // 16, k // 16
    chosen = strides if layer is None else strides[layer % len(strides) :][:1] if strides else []
    live = (i == j) | one_stride_away(i, j, radix, chosen, causal) | (i < global_blocks) | (j < global_blocks)
    mask = masks.butterfly(
        q_len, block=16, causal=causal, radix=radix, strides=strides, global_blocks=global_blocks, layer=layer
    )
    assert_keeps(mask, live & (k <= q) if causal else live)
    factors = data.draw(st.integers(0, len(there)))
    assert masks.butterfly(q_len, block=16, causal=causal, radix=radix, factors=factors) == masks.butterfly(
        q_len, block=16, causal=causal, radix=radix, strides=there[:factors]
    )


@pytest.mark.parametrize("radix", [3, 4, 7])
@pytest.mark.parametrize("count", range(1, 41))
def test_truncated_butterfly_of_any_radix_reaches_everything_in_its_log_many_layers(count, radix):
    layers = max(1, next(n for n in range(9) if radix**n >= count))
    everything = torch.ones(count, count, dtype=torch.bool)
    assert reached([masks.butterfly(16 * count, block=16, radix=radix)] * layers).all()
    causal = masks.butterfly(16 * count, block=16, radix=radix, causal=True)
    assert torch.equal(reached([causal] * layers), everything.tril())


@pytest.mark.parametrize("radix", [2, 3])
@pytest.mark.parametrize("count", range(1, 41))
def test_staged_butterfly_reaches_everything_in_a_round_or_two(count, radix):
    layers = next(n for n in range(9) if radix**n >= count)
    rounds = 1 if radix**layers == count else 2
    stages = [masks.butterfly(16 * count, block=16, radix=radix, layer=n) for n in range(max(rounds * layers, 1))]
    assert reached(stages).all()
    stages = [masks.butterfly(16 * count, block=16, radix=radix, layer=n, causal=True) for n in range(max(layers, 1))]
    assert torch.equal(reached(stages), torch.ones(count, count, dtype=torch.bool).tril())


@pytest.mark.parametrize("count", range(2, 41))
def test_every_block_of_a_truncated_butterfly_has_a_partner(count):
    counts = masks.butterfly(16 * count, block=16).indptr.diff()
    assert int(counts.min()) >= 2


@st.composite
def images(draw):
    width = draw(st.sampled_from([1, 2, 3, 16, 32, 33, 64, 100]) | st.integers(1, 40))
    return draw(st.integers(1, max(1, 400 // width))), width


@given(images(), st.integers(1, 5), st.integers(1, 20), st.integers(2, 4), blocks((16, 32, 64)), st.data())
@example((6, 64), 1, 1, 2, (16, 32), None)
@example((20, 17), 2, 1, 3, (64, 16), None)
@example((300, 1), 1, 1, 2, (64, 64), None)
def test_butterfly_2d_is_the_product_of_rows_and_columns(image, cell_h, cell_w, radix, block, data):
    height, width = image
    nodes = -(-height // cell_h), -(-width // cell_w)
    there = [[radix**n for n in range(12) if radix**n < side] for side in nodes]
    factors = data and tuple(data.draw(st.integers(0, len(strides))) for strides in there)
    if factors:
        there = [strides[:count] for strides, count in zip(there, factors)]
    axis = [torch.arange(side) for side in nodes]
    rows, cols = (
        (x[:, None] == x) | one_stride_away(x[:, None], x[None, :], radix, strides, False)
        for x, strides in zip(axis, there)
    )
    rows = rows.repeat_interleave(cell_h, 0).repeat_interleave(cell_h, 1)[:height, :height]
    cols = cols.repeat_interleave(cell_w, 0).repeat_interleave(cell_w, 1)[:width, :width]
    mask = masks.butterfly_2d(height, width, cell=(cell_h, cell_w), factors=factors, radix=radix, block=block)
    assert_keeps(mask, torch.kron(rows, cols))
