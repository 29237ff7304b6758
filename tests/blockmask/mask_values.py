import torch
from hypothesis import strategies as st

from sparseflash import BlockMask
from tests.drawn.counts import examples_times
from tests.drawn.masks import blocks, dense_masks, lengths

ARRAYS = ("indptr", "indices", "tile", "bits", "pattern", "lengths")
MOST = 150

MANY = examples_times(4)


@st.composite
def sizes(draw, most=MOST):
    block = draw(blocks())
    q_len = draw(lengths(most, block[0]))
    return q_len, draw(st.just(q_len) | lengths(most, block[1])), block


@st.composite
def dense_with_block(draw, batch=2, heads=3):
    q_len, k_len, block = draw(sizes())
    return draw(dense_masks(q_len, k_len, batch, heads, block)), block


def assert_same(mask, other):
    for name in ARRAYS:
        mine, theirs = getattr(mask, name), getattr(other, name)
        assert (mine is None) == (theirs is None), name
        assert mine is None or torch.equal(mine, theirs), name
    assert mask == other
    assert (mask != other) is False
    assert hash(mask) == hash(other)


def window(length=40, block=16):
    """The mask of the docstring: three block rows, seven partial tiles, four distinct ones."""
    return BlockMask.from_function(lambda q, k: (q - k).abs() <= 1, length, block=block)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def two_patterns():
    dense = window(100).to_dense()[0]
    return BlockMask.from_dense(torch.cat([dense, ~dense]), block=16)
