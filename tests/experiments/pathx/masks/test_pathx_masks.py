import numpy as np
import pytest
import torch

from experiments.pathx.data.device_batch import between, on_device
from experiments.pathx.data.packing import LEVELS, PADDING, pack, stack
from experiments.pathx.mask_costs import costs
from experiments.pathx.masks.grid_masks import grid_mask
from experiments.pathx.masks.live_tiles import TokenBlocks, live_tiles
from experiments.pathx.masks.orders import pixels_in
from experiments.pathx.masks.relations import parse, parse_layers
from experiments.pathx.model.gather import GatherGroups, Permute, inverse_permutation, places_in_groups
from tests.experiments.pathx.images import SIDE, expected, image, in_stored_order

CPU = torch.device("cpu")
OF_PIXELS = (
    "dense,near:3,rows:1,columns:2,axial:0,axial:2,butterfly:2,factor:4:2,tests.experiments.pathx.images:knights"
)
IMAGES = [image(0), image(1, lit=0.1), image(2, lit=0.9)]
LABELS = [1, 0, 1]


@pytest.mark.parametrize("registers", [0, 3])
@pytest.mark.parametrize("relation", parse_layers(OF_PIXELS), ids=lambda relation: relation.name)
def test_a_packed_mask_is_its_relation_within_each_image(relation, registers):
    packed = pack(IMAGES, LABELS, [relation], block=16, registers=registers, blocks=40)
    batch = on_device(packed, [relation], CPU, registers)
    batch.masks[0].validate()
    assert torch.equal(in_stored_order(batch, 0), expected(packed, relation))


@pytest.mark.parametrize("registers", [0, 3])
@pytest.mark.parametrize("relation", parse_layers(OF_PIXELS), ids=lambda relation: relation.name)
def test_the_mask_of_a_whole_image_is_its_relation(relation, registers):
    packed = stack(IMAGES[:2], LABELS[:2], [relation], block=16, registers=registers)
    batch = on_device(packed, [relation], CPU, registers)
    batch.masks[0].validate()
    assert torch.equal(in_stored_order(batch, 0), expected(packed, relation, row=1))


@pytest.mark.parametrize("relation", parse_layers(OF_PIXELS + ",tiles:3"), ids=lambda relation: relation.name)
def test_an_image_without_black_pixels_has_one_mask_in_both_layouts(relation):
    full = image(3, lit=2.0)
    packed = on_device(pack([full], [0], [relation], block=16), [relation], CPU)
    assert packed.masks[0].canonical() == grid_mask(relation, SIDE, 16)


def test_tiles_see_each_other_whole_and_hold_the_window():
    near, tiles = parse_layers("near:3,tiles:3")
    batch = on_device(pack(IMAGES, LABELS, [near, tiles], block=16), [near, tiles], CPU)
    window, whole = (in_stored_order(batch, layer) for layer in (0, 1))
    assert bool((window <= whole).all())
    assert whole.sum() > window.sum()
    live = batch.live[0].view(-1, 16)
    for row, col in zip(*np.nonzero(whole.view(len(live), 16, len(live), 16).any(3).any(1).numpy())):
        tile = whole[row * 16 : row * 16 + 16, col * 16 : col * 16 + 16]
        assert torch.equal(tile, live[row][:, None] & live[col])


@pytest.mark.parametrize("relation", parse_layers(OF_PIXELS), ids=lambda relation: relation.name)
def test_tiles_listed_as_full_are_and_no_live_tile_is_missing(relation):
    pixels = pixels_in(relation.order, SIDE)
    y, x = (part.reshape(-1, 32) for part in (pixels // SIDE, pixels % SIDE))
    nothing = np.zeros(y.shape, np.bool_)
    may, full = live_tiles(relation, TokenBlocks(y, x, ~nothing, nothing))
    dense = grid_mask(relation, SIDE, 32).to_dense()[0, 0].view(len(y), 32, len(y), 32).transpose(1, 2)
    some, every = (torch.flatten(dense, 2).any(2).numpy(), torch.flatten(dense, 2).all(2).numpy())
    assert (some <= may).all()
    assert (full == every).all()


def test_an_image_does_not_depend_on_its_batch():
    relations = parse_layers("near:3,rows:1,tiles:2")
    together = pack(IMAGES, LABELS, relations, block=16)
    alone = pack(IMAGES[1:2], LABELS[1:2], relations, block=16)
    first, last = together.blocks[1, 0] * 16, (together.blocks[1, 0] + len(alone.blocks[0])) * 16
    assert np.array_equal(together.ids[0, first:last], alone.ids[0])
    for layer in range(3):
        batches = [on_device(each, relations, CPU) for each in (together, alone)]
        whole, part = (in_stored_order(batch, layer) for batch in batches)
        assert torch.equal(whole[first:last, first:last], part)
        assert int(whole[first:last].sum()) == int(part.sum())


def test_tokens_are_the_pixels_that_are_not_black():
    packed = pack(IMAGES, LABELS, [parse("dense")], block=16, registers=2, blocks=40)
    assert packed.tokens == sum(np.count_nonzero(each) for each in IMAGES) + 2 * 3
    assert (packed.ids[0] == PADDING).sum() == 40 * 16 - packed.tokens
    for number, each in enumerate(IMAGES):
        tokens = np.concatenate([np.arange(b * 16, b * 16 + 16) for b in packed.blocks[number] if b < 40])
        ids, y, x = packed.ids[0, tokens], packed.y[0, tokens], packed.x[0, tokens]
        assert ids[:2].tolist() == [LEVELS, LEVELS + 1]
        drawn = np.zeros_like(each)
        is_pixel = (ids >= 0) & (ids < LEVELS)
        drawn[y[is_pixel], x[is_pixel]] = ids[is_pixel]
        assert np.array_equal(drawn, each)


def test_too_many_pixels_for_the_blocks_are_refused():
    with pytest.raises(ValueError, match="need 48 blocks of 16 tokens; there are 3"):
        pack([image(0, lit=2.0)] * 3, [0] * 3, [parse("dense")], block=16, blocks=3)


def test_a_black_image_has_a_block_of_padding():
    black = np.zeros((SIDE, SIDE), np.uint8)
    packed = pack([black, IMAGES[0]], [0, 1], [parse("near:2")], block=16)
    assert packed.blocks[0].tolist()[:2] == [0, packed.ids.size // 16]
    assert torch.equal(in_stored_order(on_device(packed, [parse("near:2")], CPU), 0), expected(packed, parse("near:2")))


def test_orders_lead_into_each_other_and_back():
    relations = parse_layers("rows:1,columns:1,dense")
    batch = on_device(pack(IMAGES, LABELS, relations, block=16), relations, CPU)
    x = torch.randn(1, batch.ids.shape[1], 3, dtype=torch.float64)
    now, y = "hilbert", x
    for then in ("rows", "columns", "hilbert"):
        move = between(batch, now, then)
        y, now = Permute.apply(y, move.order, move.inverse), then
    assert torch.equal(x, y)
    row = batch.y[0, batch.orders["rows"].order].long() * SIDE + batch.x[0, batch.orders["rows"].order]
    is_pixel = batch.ids[0, batch.orders["rows"].order] >= 0
    first = batch.blocks[0][batch.blocks[0] < batch.ids.shape[1] // 16]
    row, is_pixel = row[: len(first) * 16], is_pixel[: len(first) * 16]
    assert bool((row[is_pixel].diff() > 0).all())


def test_the_gradient_of_moving_tokens_is_right():
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: Permute.apply(x, order, inverse_permutation(order)), (x,))


def test_rows_are_gathered_into_groups_and_their_gradients_back():
    groups = torch.tensor([[4, 2, 5], [0, 5, 5], [5, 5, 5], [1, 5, 5]])
    place = places_in_groups(groups, 5)
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    found = GatherGroups.apply(x, groups, place, -7.0)
    assert torch.equal(found[0], torch.stack([x[4], x[2], torch.full((2,), -7.0)]))
    assert bool((found[2] == -7).all())
    assert torch.autograd.gradcheck(lambda x: GatherGroups.apply(x, groups, place, 0.0), (x,))


@pytest.mark.parametrize("text", ["window:3", "near", "near:1:2", "near:-1", "near:x", "butterfly:0", "factor:4:3"])
def test_what_is_no_mask_is_refused(text):
    with pytest.raises(ValueError, match="must"):
        parse(text)


@pytest.mark.parametrize("text", ["near:3*0", "near:3*x", "dense*"])
def test_what_is_no_list_of_layers_is_refused(text):
    with pytest.raises(ValueError, match="layers must be masks"):
        parse_layers(text)


def test_costs_and_reach_of_known_masks():
    relations = parse_layers("near:0,rows:0,columns:0,dense")
    full = image(4, lit=2.0)
    found = costs(on_device(pack([full], [1], relations, block=16), relations, CPU), relations)
    assert [each["density"] for each in found] == pytest.approx([1 / 256, 1 / 16, 1 / 16, 1])
    assert [each["reached"] for each in found] == pytest.approx([1 / 256, 1 / 16, 1, 1])
    assert [each["layers_alone"] for each in found] == [None, None, None, 1]
    assert found[1]["tiles"] == pytest.approx(1 / 16)


def test_costs_are_of_one_image():
    relations = parse_layers("dense")
    with pytest.raises(ValueError, match="one image; got 3"):
        costs(on_device(pack(IMAGES, LABELS, relations, block=16), relations, CPU), relations)


def test_registers_need_a_block_and_whole_images_whole_blocks():
    with pytest.raises(ValueError, match="registers must be from 1 to the block"):
        grid_mask(parse("dense"), SIDE, 16, 17)
    with pytest.raises(ValueError, match="multiple of 32 pixels; got 12 x 12"):
        grid_mask(parse("dense"), 12, 32)
    with pytest.raises(ValueError, match="multiple of 32 pixels"):
        stack([image(0, side=12)], [0], [parse("dense")], block=32)


def test_an_order_after_the_relation_puts_the_layers_tokens_in_it():
    near, rows = parse("near:3"), parse("near:3@rows")
    assert (near.order, rows.order, rows.name) == ("hilbert", "rows", "near:3@rows")
    with pytest.raises(ValueError, match="order of a layer's tokens must be one of"):
        parse("near:3@spiral")
    packed = pack([image(1)], [1], (near, rows), block=32)
    batch = on_device(packed, (near, rows), torch.device("cpu"))
    assert torch.equal(in_stored_order(batch, 0), in_stored_order(batch, 1))
