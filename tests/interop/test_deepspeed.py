import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, masks
from sparseflash.interop import from_deepspeed, to_deepspeed, to_sdpa

layouts = st.builds(
    lambda heads, blocks, seed: torch.randint(
        0, 2, (heads, blocks, blocks), generator=torch.Generator().manual_seed(seed)
    ),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(0, 999),
)


@given(layout=layouts, block=st.sampled_from([16, 32, 64]))
def test_a_layout_comes_in_and_goes_out(layout, block):
    mask = from_deepspeed(layout, block)
    want = layout.bool().repeat_interleave(block, 1).repeat_interleave(block, 2)
    assert mask == BlockMask.from_dense(want, block=block)
    back = to_deepspeed(mask)
    assert back.block == block and back.layout.dtype == torch.int64 and torch.equal(back.layout, layout)


def test_a_shared_pattern_is_given_to_as_many_heads_as_asked_for():
    layout = to_deepspeed(masks.butterfly(512, block=64), heads=4).layout
    assert layout.shape == (4, 8, 8) and layout.is_contiguous()
    assert (layout == layout[0]).all() and layout[0].sum() == 32


def test_cover_and_the_attention_mask_say_a_causal_mask_together():
    mask = masks.causal(256, block=64)
    layout, block = to_deepspeed(mask, cover=True)
    assert torch.equal(layout[0].bool(), torch.ones(4, 4, dtype=torch.bool).tril())
    covered = from_deepspeed(layout, block).to_dense()
    assert torch.equal(covered & to_sdpa(mask), mask.to_dense())


def test_equal_lengths_within_the_batch_go_out():
    base = BlockMask.dense(64, block=32)
    assert to_deepspeed(base.with_lengths(torch.tensor([32, 32]))).layout.tolist() == [[[1, 0], [0, 0]]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: to_deepspeed(masks.causal(64, 32, block=32)), "a DeepSpeed layout must be square, in tokens and in "
         "blocks; got 64 x 32 tokens in blocks of 32 x 32."),
        (lambda: to_deepspeed(BlockMask.dense(64, block=(16, 32))), "got 64 x 64 tokens in blocks of 16 x 32."),
        (lambda: to_deepspeed(BlockMask.dense(60, block=32)), "a DeepSpeed layout must consist of whole blocks; got "
         "60 x 60 tokens in blocks of 32 x 32. Pad the sequence, as its pad_to_block_size does."),
        (lambda: to_deepspeed(masks.causal(64, block=32)), "a DeepSpeed layout must consist of full tiles; got "
         "2 partial ones, the first with queries 0..31 and keys 0..31. cover=True makes them fully live"),
        (lambda: to_deepspeed(BlockMask.dense(64, block=32).with_lengths(torch.tensor([32, 64]))),
         "a DeepSpeed layout must serve the whole batch; got a mask whose 2 batch elements differ."),
        (lambda: to_deepspeed(from_deepspeed(torch.ones(2, 2, 2), 16), heads=3),
         "heads must be 2, as in the mask; got 3."),
        (lambda: from_deepspeed(torch.ones(2, 2), 16), "layout must have shape [H, nb, nb]; got [2, 2]."),
        (lambda: from_deepspeed(torch.ones(1, 2, 3), 16), "layout must have shape [H, nb, nb]; got [1, 2, 3]."),
        (lambda: from_deepspeed(torch.full((1, 1, 1), 2), 16), "layout must hold 0 and 1 only; got values [2]."),
        (lambda: from_deepspeed(torch.tensor([[[1, 2j], [0, 1]]]), 16),
         "layout must hold 0 and 1 only; got values [2j]."),
        (lambda: from_deepspeed(torch.ones(1, 2, 2), 48), "block must be one of 16"),
    ],
)  # fmt: skip
def test_errors_say_what_must_hold(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_deepspeeds_own_layouts_come_in():
    sparse_attention = pytest.importorskip(
        "deepspeed.ops.sparse_attention", reason="DeepSpeed is not installed: its layouts are compared where it is"
    )
    for name in ("FixedSparsityConfig", "BigBirdSparsityConfig", "BSLongformerSparsityConfig"):
        layout = getattr(sparse_attention, name)(num_heads=2, block=16).make_layout(256)
        assert torch.equal(to_deepspeed(from_deepspeed(layout, 16)).layout, layout)
