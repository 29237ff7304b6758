import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash import BlockMask, masks
from sparseflash.masks import order
from sparseflash.masks.tiling import ranges
from sparseflash.masks.tiling.grid import coordinates
from sparseflash.masks.tiling.ranges import _box_side
from tests.drawn.masks import blocks
from tests.masks.grids import all_axes, in_order, orders, shapes
from tests.masks.mask_rules import assert_keeps

BLOCKS = (16, 32, 64)
GRID_PATTERNS = pytest.mark.parametrize(
    "build",
    [
        lambda shape, **options: masks.neighborhood(shape, window=1, **options),
        lambda shape, **options: masks.swin(shape, window=2, **options),
        lambda shape, **options: masks.sliding_tiles(shape, window=1, tile=1, **options),
        lambda shape, **options: masks.dilated_grid(shape, dilation=2, **options),
        masks.axial,
    ],
    ids=["neighborhood", "swin", "sliding_tiles", "dilated_grid", "axial"],
)


def each(shape, values):
    return st.tuples(*(values(side) for side in shape))


# ---------------------------------------------------------------------- neighbourhood


def natten_axis(n, window, stride, dilation, causal):
    seen = np.zeros((n, n), dtype=bool)
    left, right = window // 2, window // 2 + window % 2 - 1
    for q, k in itertools.product(range(n), repeat=2):
        if q % dilation != k % dilation:
            continue
        group = q % dilation
        length = n // dilation + 1 - (group + (dilation - n % dilation)) // dilation
        x, y = q // dilation, k // dilation
        if causal:
            leader = min((x // stride) * stride + stride - 1, length - 1)
            seen[q, k] = max(leader - left - right, 0) <= y < min(x + 1, length)
        else:
            leader = min((x // stride) * stride + stride // 2, length - 1)
            start = max(leader - left, 0) + (leader + right >= length) * (length - right - leader - 1)
            seen[q, k] = start <= y < start + window
    return seen


def cropped_axis(n, window, stride, dilation, causal):
    seen = np.zeros((n, n), dtype=bool)
    for q in range(n):
        same = [k for k in range(n) if k % dilation == q % dilation]
        group = [k for k in same if k // dilation // stride == q // dilation // stride]
        if causal:
            leader = group[-1]
            around = range(-(window - 1), 1)
        else:
            leader = group[min(stride // 2, len(group) - 1)]
            around = range(-(window // 2), window - window // 2)
        for step in around:
            k = leader + step * dilation
            if 0 <= k < n and (k <= q or not causal):
                seen[q, k] = True
    return seen


@st.composite
def neighborhoods(draw):
    shape = draw(shapes())
    edges = draw(st.sampled_from(["shift", "crop"]))
    options = []
    for side in shape:
        window = draw(st.integers(1, side if edges == "shift" else side + 3))
        dilation = draw(st.integers(1, side // window if edges == "shift" else 4))
        options.append((window, draw(st.integers(1, window)), dilation, draw(st.booleans())))
    return shape, edges, options, draw(orders(shape)), draw(blocks(BLOCKS))


@given(neighborhoods())
@example(((19, 5), "shift", [(4, 3, 2, False), (2, 2, 1, True)], None, (16, 16)))
@example(((7, 23), "crop", [(9, 2, 3, False), (5, 4, 1, False)], None, (32, 16)))
def test_neighborhood_is_nattens_rule_or_the_cropped_window(drawn):
    shape, edges, options, by, block = drawn
    window, stride, dilation, causal = zip(*options)
    mask = masks.neighborhood(
        shape, window=window, stride=stride, dilation=dilation, causal=causal, edges=edges, order=by, block=block
    )
    rule = natten_axis if edges == "shift" else cropped_axis
    assert_keeps(mask, all_axes(shape, [rule(n, *option) for n, option in zip(shape, options)], by))


@pytest.mark.parametrize("edges", ["shift", "crop"])
def test_a_cropped_window_is_a_band_in_one_dimension(edges):
    mask = masks.neighborhood((100,), window=7, edges=edges, block=32)
    assert (mask == masks.local(100, window=7, block=32)) == (edges == "crop")


@pytest.mark.parametrize(
    "by",
    [
        lambda shape: None,
        lambda shape: order.tiles(shape, 8),
        lambda shape: order.tiles(shape, (5, 7)),
        order.morton,
        order.hilbert,
        lambda shape: order.residues(shape, 2),
    ],
    ids=["row_major", "tiles", "ragged_tiles", "morton", "hilbert", "residues"],
)
@pytest.mark.parametrize("shape", [(64, 48), (37, 65)], ids=str)
def test_neighborhood_keeps_its_rule_on_images_of_many_blocks(shape, by):
    options = (5, 2, 3, False), (8, 1, 2, True)
    window, stride, dilation, causal = zip(*options)
    chosen = by(shape)
    mask = masks.neighborhood(
        shape, window=window, stride=stride, dilation=dilation, causal=causal, order=chosen, block=(64, 32)
    )
    live = all_axes(shape, [natten_axis(n, *option) for n, option in zip(shape, options)], chosen)
    assert torch.equal(mask.validate().to_dense()[0, 0], live)


@given(st.integers(1, 3), st.integers(1, 40), st.integers(0, 5), st.integers(0, 2), st.data())
def test_boxes_are_as_long_as_the_pieces_that_share_a_block(lines, side, log, axis, data):
    pieces = data.draw(st.lists(st.integers(0, 1), min_size=(side >> log) + 1, max_size=(side >> log) + 1))
    block_of = torch.tensor(pieces).repeat_interleave(1 << log)[:side].repeat(lines, 1, 1).movedim(-1, axis)
    length = _box_side(block_of, axis)
    assert length & (length - 1) == 0

    def shared(length):
        return all(len(set(chunk.tolist())) == 1 for chunk in block_of.movedim(axis, -1)[0, 0].split(length))

    assert shared(length) and length >= min(1 << log, 1 << (side - 1).bit_length())
    assert length >= side or not shared(2 * length)


# ---------------------------------------------------------------------- swin, sliding tiles


def swin_as_published(shape, window, shift):
    rolled = [np.roll(np.arange(n), -s) for n, s in zip(shape, shift)]
    regions = np.zeros(shape, dtype=int)
    slices = [[slice(0, -w), slice(-w, -s), slice(-s, None)] if s else [slice(0, None)] for w, s in zip(window, shift)]
    for number, region in enumerate(itertools.product(*slices)):
        regions[region] = number
    windows = np.zeros(shape, dtype=int)
    for axis, (n, w) in enumerate(zip(shape, window)):
        along = [1] * len(shape)
        along[axis] = n
        windows = windows * n + (np.arange(n) // w).reshape(along)
    group = np.zeros(shape, dtype=int)
    group[np.ix_(*rolled)] = windows * (regions.max() + 1) + regions
    return torch.from_numpy(group.reshape(-1)[:, None] == group.reshape(-1)[None, :])


@st.composite
def swins(draw):
    window = draw(st.tuples(*[st.integers(1, 6)] * draw(st.integers(1, 2))))
    shape = tuple(w * draw(st.integers(1, 12 // w)) for w in window)
    return shape, window, tuple(draw(st.integers(0, w - 1)) for w in window), draw(orders(shape)), draw(blocks(BLOCKS))


@given(swins())
def test_swin_is_the_mask_of_the_cyclic_shift(drawn):
    shape, window, shift, by, block = drawn
    live = in_order(swin_as_published(shape, window, shift), by)
    assert_keeps(masks.swin(shape, window=window, shift=shift, order=by, block=block), live)


@given(st.data(), shapes())
def test_swin_cuts_any_side_at_the_shift_and_every_window(data, shape):
    window = data.draw(each(shape, lambda side: st.integers(1, side + 2)))
    shift = tuple(data.draw(st.integers(0, w - 1)) for w in window)
    seen = []
    for n, w, s in zip(shape, window, shift):
        cuts = np.cumsum([x % w == s % w for x in range(n)])
        seen.append(cuts[:, None] == cuts[None, :])
    assert_keeps(masks.swin(shape, window=window, shift=shift, block=16), all_axes(shape, seen))


@given(st.data(), blocks(BLOCKS))
def test_sliding_tiles_move_a_clamped_window_over_the_tiles(data, block):
    tile, shape, window = [], [], []
    for most in data.draw(st.sampled_from([(12, 12), (4, 6, 8), (60,)])):
        t = data.draw(st.integers(1, 4))
        count = data.draw(st.integers(1, max(1, most // t)))
        tile.append(t)
        shape.append(t * count)
        window.append(t * data.draw(st.integers(1, count)))
    by = data.draw(orders(tuple(shape)))
    seen = []
    for n, w, t in zip(shape, window, tile):
        n, w = n // t, w // t
        left, right = w // 2, w // 2 + w % 2 - 1
        centre = np.clip(np.arange(n), left, n - 1 - right)[:, None]
        one = (np.arange(n) >= centre - left) & (np.arange(n) <= centre + right)
        seen.append(np.kron(one, np.ones((t, t), dtype=bool)))
    mask = masks.sliding_tiles(tuple(shape), window=window, tile=tile, order=by, block=block)
    assert_keeps(mask, all_axes(tuple(shape), seen, by))


@pytest.mark.parametrize(("video", "tile"), [((8, 16, 16), (4, 4, 4)), ((4, 8, 32), (2, 4, 8))])
def test_sliding_tiles_in_the_order_of_tiles_have_no_partial_tile(video, tile):
    window = tuple(2 * t for t in tile)
    mask = masks.sliding_tiles(video, window=window, tile=tile, order=order.tiles(video, tile), block=64)
    assert not mask.tile.any() and len(mask.bits) == 0
    tiles = masks.neighborhood(tuple(n // t for n, t in zip(video, tile)), window=2, block=16).to_dense()[0, 0]
    assert mask == BlockMask.from_layout(tiles, block=64)


# ---------------------------------------------------------------------- axial, dilated


@given(st.data(), shapes(), blocks(BLOCKS))
def test_axial_sees_what_differs_on_one_axis_at_most(data, shape, block):
    by = data.draw(orders(shape))
    place = np.indices(shape).reshape(len(shape), -1)
    differ = (place[:, :, None] != place[:, None, :]).sum(0)
    assert_keeps(masks.axial(shape, order=by, block=block), in_order(torch.from_numpy(differ <= 1), by))


@given(st.data(), shapes(), blocks(BLOCKS))
def test_dilated_grid_sees_the_same_residues(data, shape, block):
    by = data.draw(orders(shape))
    dilation = data.draw(each(shape, lambda side: st.integers(1, side + 2)))
    seen = [(np.arange(n)[:, None] - np.arange(n)) % d == 0 for n, d in zip(shape, dilation)]
    assert_keeps(masks.dilated_grid(shape, dilation=dilation, order=by, block=block), all_axes(shape, seen, by))


# ---------------------------------------------------------------------- cost


def test_a_dilated_grid_takes_memory_of_its_live_tiles_alone():
    # A matrix of blocks and groups would take 32 GB.
    assert masks.dilated_grid((1024, 1024), dilation=1024) == masks.local(1 << 20, window=1)


def test_stored_bits_of_a_window_do_not_grow_with_the_image():
    for by in (lambda shape: None, lambda shape: order.tiles(shape, 8), order.morton):
        small, large = ((side, side) for side in (256, 512))
        bits = [len(masks.neighborhood(shape, window=7, order=by(shape), block=64).bits) for shape in (small, large)]
        assert bits[0] == bits[1]


def test_a_window_in_the_order_of_tiles_has_far_fewer_live_tiles():
    image = (512, 512)
    rows, tiles = (
        len(masks.neighborhood(image, window=13, order=by, block=64).indices) for by in (None, order.tiles(image, 8))
    )
    assert rows > 4 * tiles


@pytest.mark.parametrize(
    "options", [{}, {"dilation": (1, 2, 2), "edges": "crop"}, {"causal": (True, False, False)}, {"order": None}],
    ids=["plain", "dilated", "causal", "row-major"],
)  # fmt: skip
def test_few_more_tiles_of_a_window_are_evaluated_on_an_axis_than_are_distinct(options):
    shape, evaluated = (10, 24, 48), []
    options = {"order": order.tiles(shape, (2, 8, 8)), **options}
    inside = ranges._inside

    def counted(window, *arguments):
        evaluated.append(len(window))
        return inside(window, *arguments)

    with mock.patch.object(ranges, "_inside", counted):
        mask = masks.neighborhood(shape, window=(5, 9, 12), **options)
    assert len(evaluated) == 3 and max(evaluated) <= 3 * (len(mask.bits) + 1)


def test_windows_of_many_distinct_tiles_are_evaluated_axis_by_axis():
    shape, evaluated = (16, 32, 32), []
    inside = ranges._inside

    def counted(window, *arguments):
        evaluated.append(len(window))
        return inside(window, *arguments)

    with mock.patch.object(ranges, "_inside", counted):
        mask = masks.neighborhood(shape, window=(9, 12, 12), order=order.hilbert(shape))
    assert sum(evaluated) < 0.75 * len(mask.bits)


def test_tile_sizes_of_queries_and_keys_may_differ():
    shape, by = (16, 24), order.hilbert((16, 24))
    dense = masks.neighborhood(shape, window=5, order=by, block=16).to_dense()[0, 0]
    assert_keeps(masks.neighborhood(shape, window=5, order=by, block=(128, 16)), dense)


# ---------------------------------------------------------------------- errors


@GRID_PATTERNS
@pytest.mark.parametrize("shape", [4, "44", (), None, 4.0, {4, 5}], ids=str)
def test_grid_patterns_refuse_what_is_no_shape(build, shape):
    with pytest.raises(TypeError, match=r"shape must be a tuple of side lengths, as \(height, width\); got"):
        build(shape, block=16)


@GRID_PATTERNS
def test_grid_patterns_refuse_sides_that_are_no_lengths(build):
    with pytest.raises(TypeError, match=r"each side of shape must be an integer number of tokens; got 2\.5"):
        build((4, 2.5), block=16)
    with pytest.raises(ValueError, match=r"shape must have sides of at least 1 token; got \(4, 0\)"):
        build((4, 0), block=16)
    with pytest.raises(ValueError, match=r"q_len must be between 1 and 2\^31 - 257 tokens"):
        build((2**16, 2**16), block=16)


@GRID_PATTERNS
def test_orders_may_be_arrays_and_lists(build):
    order = torch.tensor([3, 1, 0, 2])
    expected = build((2, 2), order=order, block=16)
    assert build((2, 2), order=order.tolist(), block=16) == build((2, 2), order=order.numpy(), block=16) == expected


@GRID_PATTERNS
def test_grid_patterns_refuse_what_is_no_order(build):
    with pytest.raises(TypeError, match=r"order must be a list of integers; got torch\.float32"):
        build((2, 2), order=[0.0, 1.0, 2.0, 3.0], block=16)
    with pytest.raises(TypeError, match=r"order must be an integer tensor; got torch\.float32"):
        build((2, 2), order=torch.arange(4.0), block=16)
    with pytest.raises(ValueError, match=r"order must have shape \[4\], one entry a token; got \[3\]"):
        build((2, 2), order=torch.arange(3), block=16)
    for bad in ([0, 1, 2, 2], [1, 2, 3, 4], [-1, 0, 1, 2]):
        with pytest.raises(ValueError, match=r"order must hold each of 0\.\.3 once"):
            build((2, 2), order=torch.tensor(bad), block=16)


@GRID_PATTERNS
def test_grid_patterns_refuse_a_block_that_is_none(build):
    with pytest.raises(ValueError, match="block must be one of"):
        build((4, 4), block=48)


@pytest.mark.parametrize("name", ["window", "stride", "dilation"])
def test_neighborhood_refuses_sizes_that_are_none(name):
    options = {"window": 3, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1 on every axis; got 0"):
        masks.neighborhood((8, 8), **options)
    with pytest.raises(ValueError, match=rf"{name} must be an integer, or one for each of the 2 axes; got \(1, 1, 1\)"):
        masks.neighborhood((8, 8), **options | {name: (1, 1, 1)})
    with pytest.raises(TypeError, match=f"{name} must be an integer number of"):
        masks.neighborhood((8, 8), **options | {name: 1.5})


def test_neighborhood_refuses_what_does_not_go_together():
    with pytest.raises(ValueError, match="stride must not exceed window; got 4 and 3"):
        masks.neighborhood((8, 8), window=3, stride=4)
    with pytest.raises(ValueError, match=r'must not exceed the side with edges="shift"; got 3 \* 3 and 8'):
        masks.neighborhood((16, 8), window=3, dilation=3)
    with pytest.raises(ValueError, match='edges must be "shift" or "crop"; got \'wrap\''):
        masks.neighborhood((8, 8), window=3, edges="wrap")
    for causal in (1, (True,), (True, 0)):
        with pytest.raises(ValueError, match="causal must be a bool, or one for each of the 2 axes; got"):
            masks.neighborhood((8, 8), window=3, causal=causal)


def test_swin_refuses_a_shift_of_a_window_or_more():
    with pytest.raises(ValueError, match="shift must lie between 0 and window - 1; got 4 for a window of 4"):
        masks.swin((8, 8), window=4, shift=4)
    with pytest.raises(ValueError, match="shift must be at least 0 on every axis; got -1"):
        masks.swin((8, 8), window=4, shift=-1)


def test_sliding_tiles_refuse_tiles_that_do_not_divide():
    with pytest.raises(ValueError, match="tile must divide the side and the window; got 3 for 8 and 3, in tokens"):
        masks.sliding_tiles((9, 8), window=3, tile=3)
    with pytest.raises(ValueError, match="tile must divide the side and the window; got 4 for 8 and 6"):
        masks.sliding_tiles((8, 8), window=6, tile=4)
    with pytest.raises(ValueError, match="window must not exceed the side; got 12 and 8"):
        masks.sliding_tiles((8, 8), window=12, tile=4)


# ---------------------------------------------------------------------- grids


def test_coordinates_are_those_of_numpy():
    for shape in ((5,), (3, 4), (2, 3, 4)):
        assert np.array_equal(coordinates(shape).T, np.indices(shape).reshape(len(shape), -1))
