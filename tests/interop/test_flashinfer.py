import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, masks
from sparseflash.interop import FlashInferBSR, from_flashinfer, scores, to_flashinfer
from tests.drawn.masks import blocks, dense_masks


def dense_of(bsr):
    dense = torch.zeros(bsr.M, bsr.N, dtype=torch.bool)
    for i in range(bsr.M // bsr.R):
        for e in range(bsr.indptr[i], bsr.indptr[i + 1]):
            j = int(bsr.indices[e])
            block = torch.ones(bsr.R, bsr.C, dtype=torch.bool) if bsr.mask is None else bsr.mask[e]
            dense[i * bsr.R : (i + 1) * bsr.R, j * bsr.C : (j + 1) * bsr.C] = block
    return dense


@given(block=blocks(), rows=st.integers(1, 4), cols=st.integers(1, 4), data=st.data())
def test_a_head_goes_out_and_comes_back(block, rows, cols, data):
    dense = data.draw(dense_masks(rows * block[0], cols * block[1], 2, 2, block))
    mask = BlockMask.from_dense(dense, block=block)
    b, h = (data.draw(st.integers(0, size - 1)) for size in dense.shape[:2])
    bsr = to_flashinfer(mask, batch=b, head=h)
    assert bsr.indptr.dtype == bsr.indices.dtype == torch.int32
    assert torch.equal(dense_of(bsr), dense[b, h])
    assert from_flashinfer(*bsr) == BlockMask.from_dense(dense[b, h], block=block)


def test_a_mask_of_full_tiles_needs_no_block_masks():
    assert to_flashinfer(masks.butterfly(256, block=32)).mask is None
    assert to_flashinfer(masks.butterfly(256, block=32, causal=True)).mask.shape == (25, 32, 32)


@given(
    size=st.sampled_from([(1, 1), (3, 5), (64, 8), (16, 32), (512, 128)]),
    rows=st.integers(1, 4),
    cols=st.integers(1, 4),
    with_mask=st.booleans(),
    seed=st.integers(0, 999),
)
def test_blocks_of_any_size_come_in(size, rows, cols, with_mask, seed):
    generator = torch.Generator().manual_seed(seed)
    layout = torch.rand(rows, cols, generator=generator) < 0.5
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), layout.sum(1).cumsum(0)])
    indices = layout.nonzero()[:, 1]
    live = torch.rand(len(indices), *size, generator=generator) < 0.5 if with_mask else None
    arguments = (indptr.int(), indices.int(), rows * size[0], cols * size[1], *size, live)
    mask = from_flashinfer(*arguments, block=64)
    want = dense_of(FlashInferBSR(*arguments))
    assert mask == BlockMask.from_dense(want, block=64)
    own = from_flashinfer(*arguments)
    assert torch.equal(own.to_dense()[0, 0], want)
    assert (own.block_q, own.block_k) == (size if size == (16, 32) else (128, 128))


def test_each_distinct_tile_is_taken_apart_once(monkeypatch):
    taken = []
    unpack = scores.bitmask.unpack
    monkeypatch.setattr(
        scores.bitmask, "unpack", lambda words, block_k: taken.append(len(words)) or unpack(words, block_k)
    )
    monkeypatch.setattr(scores, "SCORES_AT_ONCE", 1)
    mask = masks.local(1024, window=100, block=32)
    bsr = to_flashinfer(mask)
    assert taken == [1] * (len(mask.bits) + 1)
    assert torch.equal(dense_of(bsr), mask.to_dense()[0, 0])


def test_blocks_of_a_row_may_come_in_any_order():
    live = torch.rand(3, 16, 16) < 0.5
    mask = from_flashinfer(torch.tensor([0, 3]), torch.tensor([2, 0, 1]), 16, 48, 16, 16, live)
    assert torch.equal(mask.to_dense()[0, 0], torch.cat([live[1], live[2], live[0]], dim=1))


INDPTR, INDICES = torch.tensor([0, 1, 3]), torch.tensor([1, 0, 1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: to_flashinfer(masks.causal(100)), "a FlashInfer plan must consist of whole blocks; got 100 x 100 "
         "tokens in blocks of 128 x 128. Pad queries and keys to whole blocks."),
        (lambda: to_flashinfer(BlockMask.dense(32, block=16).with_lengths(torch.tensor([3, 5]))),
         "a FlashInfer plan must hold a single pattern; got a mask with 2 for 2 x 1 (batch x heads): select one with "
         "batch=."),
        (lambda: from_flashinfer(INDPTR, INDICES, 32, 33, 16, 16), "R x C must divide M x N; got 16 x 16 and 32 x 33."),
        (lambda: from_flashinfer(INDPTR, INDICES, 32, 32, 0, 16), "R x C must divide M x N; got 0 x 16 and 32 x 32."),
        (lambda: from_flashinfer(INDPTR, INDICES, 48, 32, 16, 16), "indptr must have 4 entries"),
        (lambda: from_flashinfer(INDPTR.flip(0), INDICES, 32, 32, 16, 16), "indptr must have 3 entries, start at 0 and "
         "not decrease; got [3, 1, 0] of shape [3]."),
        (lambda: from_flashinfer(INDPTR, INDICES[:2], 32, 32, 16, 16), "indices must have the 3 entries of indptr; "
         "got [2]."),
        (lambda: from_flashinfer(INDPTR, INDICES + 1, 32, 32, 16, 16), "cols must lie in 0..1; got 1..2."),
        (lambda: from_flashinfer(INDPTR, torch.ones(3, dtype=torch.int32), 32, 32, 16, 16),
         "indices must list a block at most once per row."),
        (lambda: from_flashinfer(INDPTR, INDICES, 32, 32, 16, 16, torch.ones(3, 16, 8, dtype=torch.bool)),
         "mask must have shape [3, 16, 16]; got [3, 16, 8]."),
    ],
)  # fmt: skip
def test_errors_say_what_must_hold(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_a_block_mask_of_numbers_is_refused():
    with pytest.raises(TypeError, match="mask must be boolean"):
        from_flashinfer(INDPTR, INDICES, 32, 32, 16, 16, torch.ones(3, 16, 16))
