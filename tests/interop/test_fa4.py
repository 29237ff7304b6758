import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from sparseflash import BlockMask, masks
from sparseflash.interop import BlockSparseTensors, from_fa4, to_fa4
from sparseflash.interop.lookup import mask_mod
from tests.drawn.masks import block_masks

fa4_masks = block_masks(most_tokens=400, blocks=(128,), batch=2, heads=2)


def listed(counts, indices, rows, cols):
    dense = torch.zeros(*counts.shape[:2], rows, cols, dtype=torch.bool)
    for b, h, i in torch.ones(counts.shape).nonzero().tolist():
        row = indices[b, h, i, : counts[b, h, i]].tolist()
        assert row == sorted(set(row)), "the kernel wants them in order"
        dense[b, h, i, row] = True
    return dense


def classes(mask):
    """FA4's compute_block_sparsity: blocks with some live score inside the lengths, and blocks with all."""
    (rows, cols), dense = mask.blocks, mask.to_dense()
    some = torch.zeros(*dense.shape[:2], rows, cols, dtype=torch.bool)
    every = some.clone()
    for i in range(rows):
        for j in range(cols):
            block = dense[:, :, i * mask.block_q : (i + 1) * mask.block_q, j * mask.block_k : (j + 1) * mask.block_k]
            some[:, :, i, j], every[:, :, i, j] = block.any(-1).any(-1), block.all(-1).all(-1)
    return some & ~every, every


@given(mask=fa4_masks)
def test_forward_and_backward_lists_name_the_blocks(mask):
    tensors = to_fa4(mask, partial=True)
    partial, full = classes(mask)
    rows, cols = mask.blocks
    forward, backward = tensors.forward, tensors.backward
    assert all(array.dtype == torch.int32 for array in (*forward[:4], *backward[:4]))
    assert torch.equal(listed(*forward[:2], rows, cols), partial)
    assert torch.equal(listed(*forward[2:4], rows, cols), full)
    assert torch.equal(listed(*backward[:2], cols, rows).mT, partial)
    assert torch.equal(listed(*backward[2:4], cols, rows).mT, full)
    assert forward.block_size == backward.block_size == (128, 128)
    assert (tensors.lookup is None) == (not partial.any())


@given(mask=fa4_masks)
def test_a_mask_goes_out_and_comes_back_with_its_lookup(mask):
    tensors = to_fa4(mask, partial=True)
    rule = None if tensors.lookup is None else mask_mod(tensors.lookup, *tensors.forward.block_size)
    back = from_fa4(tensors.forward, mask.q_len, mask.k_len, mask_mod=rule)
    assert back == BlockMask.from_dense(mask.to_dense())


@given(mask=block_masks(most_tokens=200, blocks=(16, 128), batch=2, heads=2))
def test_the_lookup_says_every_score(mask):
    from sparseflash.interop.lookup import tile_lookup

    rule = mask_mod(tile_lookup(mask), mask.block_q, mask.block_k)
    dense = mask.to_dense().expand(2, 2, -1, -1)
    assert torch.equal(create_mask(rule, 2, 2, mask.q_len, mask.k_len, device="cpu"), dense)


@given(q_len=st.integers(1, 600), k_len=st.integers(1, 600))
def test_ragged_ends_need_no_mask_mod(q_len, k_len):
    mask = BlockMask.dense(q_len, k_len)
    tensors = to_fa4(mask)
    assert tensors.lookup is None and (tensors.forward.mask_block_cnt == 0).all()
    assert from_fa4(tensors.forward, q_len, k_len) == mask


def test_lists_are_as_wide_as_the_longest_row():
    forward, backward, _ = to_fa4(masks.butterfly(4096, factors=2))
    assert forward.full_block_idx.shape == (1, 1, 32, 3) and forward.mask_block_idx.shape == (1, 1, 32, 1)
    assert backward.full_block_idx.shape == (1, 1, 32, 3)


def test_query_blocks_of_256_go_out_for_blackwell():
    mask = BlockMask.from_layout(torch.eye(2, dtype=torch.bool), block=(256, 128))
    tensors = to_fa4(mask)
    assert tensors.forward.block_size == (256, 128)
    assert from_fa4(tensors.forward, 512, 256) == mask


def test_a_rule_may_say_what_is_live_in_partial_blocks():
    mask = masks.causal(300)
    assert from_fa4(to_fa4(mask, partial=True).forward, 300, 300, mask_mod=lambda b, h, q, k: k <= q) == mask


def test_the_fields_are_those_of_fa4():
    fa4 = pytest.importorskip(
        "flash_attn.cute.block_sparsity",
        reason="flash-attn-4 is not installed: its tensors are compared where it is",
        exc_type=ImportError,
    )
    theirs = fa4.BlockSparseTensorsTorch(**to_fa4(masks.butterfly(512)).forward._asdict())
    assert theirs.block_size == (128, 128)
    assert from_fa4(theirs, 512, 512) == masks.butterfly(512)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: to_fa4(masks.butterfly(512, block=64)), "blocks must have 128 keys and a multiple of 128 "
         "queries for FA4; got 64 x 64. Reblock the mask: mask.reblock(128)."),
        (lambda: to_fa4(BlockMask.dense(512, block=(128, 256))), "got 128 x 256."),
        (lambda: to_fa4(masks.causal(512)), "partial=True must be given for a mask with partial tiles; got 4, the "
         "first at block (0, 0) of pattern 0. FA4 treats them as full unless it is given a mask_mod"),
        (lambda: from_fa4(to_fa4(masks.causal(512), partial=True).forward, 512, 512), "mask_mod must be given for "
         "partial blocks, to say which scores are live; got 4, the first block (0, 0) of head 0 of batch element 0."),
        (lambda: from_fa4(to_fa4(BlockMask.dense(512)).forward._replace(block_size=None), 512, 512),
         "block_size must be set in the tensors"),
        (lambda: from_fa4(to_fa4(BlockMask.dense(512)).forward._replace(block_size=(128, 96)), 512, 512),
         "block must be one of 16"),
        (lambda: from_fa4(to_fa4(BlockMask.dense(512)).forward, 512, 300), "cols must lie in 0..2; got 0..3."),
        (lambda: from_fa4(to_fa4(BlockMask.dense(512)).forward, 300, 512), "the lists of partial blocks must have "
         "shapes [B, H, 3] and [B, H, 3, width]; got [1, 1, 4] and [1, 1, 4, 1]."),
        (lambda: from_fa4(BlockSparseTensors(*[torch.zeros(s, dtype=torch.int32) for s in
         ((1, 1, 1), (1, 1, 1, 1), (1, 2, 1), (1, 2, 1, 1))], (128, 128)), 10, 10),
         "the lists of full and of partial blocks must have one shape [B, H, M]; got [1, 2, 1] and [1, 1, 1]."),
    ],
)  # fmt: skip
def test_errors_say_what_must_hold(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
