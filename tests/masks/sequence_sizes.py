import torch
from hypothesis import strategies as st

from sparseflash import BlockMask
from tests.drawn.masks import blocks, lengths
from tests.masks.mask_rules import BLOCKS, grid

MOST = 150


def sizes():
    return st.tuples(lengths(MOST), blocks(BLOCKS))


def square(length):
    return grid(length, length)


def is_power_of_two(x):
    return (x > 0) & ((x & (x - 1)) == 0)


def assert_heads(mask, live):
    mask.validate()
    assert mask == BlockMask.from_dense(live, block=(mask.block_q, mask.block_k))
    assert torch.equal(mask.to_dense()[0], live)


def reached(layers):
    """`[nb, nb]`: whether block i hears of block j through these masks, first to last."""
    reach = torch.eye(layers[0].blocks[0], dtype=torch.bool)
    for mask in layers:
        layout = torch.zeros_like(reach)
        rows = torch.repeat_interleave(torch.arange(len(layout)), mask.indptr.diff().long())
        layout[rows, mask.indices.long()] = True
        reach = (layout.float() @ reach.float()) > 0
    return reach
