import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, masks
from tests.drawn.masks import blocks, dense_masks


def by_formula(mask, text, after):
    size = mask.q_len
    want = torch.ones(1, mask.shape[1], size + text, size + text, dtype=torch.bool)
    own = slice(0, size) if after else slice(text, None)
    want[:, :, own, own] = mask.to_dense()
    return want


@given(st.data(), st.integers(0, 70), st.booleans())
def test_text_sees_all_and_is_seen_by_all(data, text, after):
    size = data.draw(st.integers(1, 70))
    block, heads = data.draw(blocks()), data.draw(st.integers(1, 2))
    mask = BlockMask.from_dense(data.draw(dense_masks(size, size, 1, heads, block)), block=block)
    found = masks.with_text(mask, text=text, after=after)
    assert torch.equal(found.to_dense(), by_formula(mask, text, after))


def test_a_video_with_text_of_whole_blocks_has_no_more_partial_tiles():
    video = masks.neighborhood((4, 8, 8), window=(2, 4, 4), order=masks.order.tiles((4, 8, 8), (2, 4, 4)), block=32)
    found = masks.with_text(video, text=64)
    assert torch.equal(found.to_dense(), by_formula(video, 64, False))
    assert int((found.tile > 0).sum()) == int((video.tile > 0).sum())


def test_masks_that_are_no_grids_are_refused():
    with pytest.raises(ValueError, match="one batch element, and of as many queries as keys; got 1 batch elements, 32"):
        masks.with_text(BlockMask.dense(32, 64), text=5)
    two = masks.per_batch([masks.causal(32), masks.dense(32)])
    with pytest.raises(ValueError, match="got 2 batch elements, 32 queries and 32 keys"):
        masks.with_text(two, text=5)
    with pytest.raises(ValueError, match="text must be at least 0 tokens; got -1"):
        masks.with_text(masks.causal(32), text=-1)
    with pytest.raises(TypeError, match="mask must be a sparseflash BlockMask; got"):
        masks.with_text(torch.ones(3, 3), text=5)
