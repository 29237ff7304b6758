import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, masks
from sparseflash.interop import from_torch_sparse, to_torch_sparse
from tests.drawn.masks import block_masks, blocks, dense_masks, lengths


@given(mask=block_masks(batch=2, heads=3), data=st.data())
def test_a_tensor_has_the_live_scores_of_its_head(mask, data):
    dense = mask.to_dense()
    b, h = (data.draw(st.integers(0, size - 1)) for size in dense.shape[:2])
    matrix = to_torch_sparse(mask, batch=b, head=h)
    assert matrix.layout == torch.sparse_csr and matrix.dtype == torch.bool
    assert torch.equal(matrix.to_dense(), dense[b, h])
    block = (mask.block_q, mask.block_k)
    assert from_torch_sparse(matrix, block=block) == BlockMask.from_dense(dense[b, h], block=block)


@given(block=blocks(), rows=st.integers(1, 4), cols=st.integers(1, 4), data=st.data())
def test_a_bsr_tensor_has_the_tiles_as_blocks(block, rows, cols, data):
    dense = data.draw(dense_masks(rows * block[0], cols * block[1], 1, 1, block))
    mask = BlockMask.from_dense(dense, block=block)
    matrix = to_torch_sparse(mask, layout=torch.sparse_bsr)
    assert matrix.crow_indices().tolist() == mask.indptr.tolist()
    assert matrix.col_indices().tolist() == mask.indices.tolist()
    assert matrix.values().shape == (len(mask.indices), *block) and matrix.dtype == torch.bool
    assert torch.equal(matrix.to_dense(), dense[0, 0])
    assert from_torch_sparse(matrix) == mask


@given(
    dense=st.tuples(lengths(70), lengths(70)).flatmap(lambda n: dense_masks(*n, 1, 1, (16, 16))),
    block=blocks((16, 32)),
    layout=st.sampled_from([torch.sparse_coo, torch.sparse_csr]),
)
def test_a_tensor_made_by_pytorch_comes_in(dense, block, layout):
    matrix = dense[0, 0].to_sparse(layout=layout)
    assert from_torch_sparse(matrix, block=block) == BlockMask.from_dense(dense[0, 0], block=block)


def test_blocks_made_by_pytorch_come_in_with_their_size_or_another():
    dense = torch.rand(96, 60) < 0.3
    dense[:32] = False
    assert from_torch_sparse(dense.to_sparse_bsr((32, 20))) == BlockMask.from_dense(dense, block=128)
    assert from_torch_sparse(dense.to_sparse_bsr((3, 20)), block=16) == BlockMask.from_dense(dense, block=16)
    whole = dense[:, :32].contiguous()
    assert from_torch_sparse(whole.to_sparse_bsr((16, 32))) == BlockMask.from_dense(whole, block=(16, 32))


@given(mask=block_masks(batch=1, heads=3))
def test_a_list_of_tensors_is_a_list_of_heads(mask):
    matrices = [to_torch_sparse(mask, head=h) for h in range(mask.shape[1])]
    block = (mask.block_q, mask.block_k)
    assert from_torch_sparse(matrices, block=block) == BlockMask.from_dense(mask.to_dense(), block=block)


def test_stored_false_entries_and_duplicates_do_no_harm():
    places, values = torch.tensor([[0, 1, 2, 2], [0, 1, 2, 2]]), torch.tensor([True, False, True, True])
    matrix = torch.sparse_coo_tensor(places, values, (20, 20), check_invariants=True)
    mask = from_torch_sparse(matrix, block=16)
    assert mask.to_dense()[0, 0].nonzero().tolist() == [[0, 0], [2, 2]]
    starts = torch.tensor([0, 2, *[2] * 19])
    matrix = torch.sparse_csr_tensor(
        starts, torch.tensor([3, 5]), torch.tensor([False, True]), (20, 20), check_invariants=True
    )
    assert from_torch_sparse(matrix, block=16).to_dense()[0, 0].nonzero().tolist() == [[0, 5]]


def broken_csr(starts):
    return torch.sparse_csr_tensor(
        torch.tensor(starts), torch.tensor([0, 1]), torch.ones(2, dtype=torch.bool), (2, 2), check_invariants=False
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: to_torch_sparse(masks.causal(32), layout=torch.strided), ValueError,
         "layout must be torch.sparse_csr or torch.sparse_bsr; got torch.strided."),
        (lambda: to_torch_sparse(masks.causal(100), layout=torch.sparse_bsr), ValueError,
         "a BSR tensor must consist of whole blocks; got 100 x 100 tokens in blocks of 128 x 128. Use "
         "layout=torch.sparse_csr."),
        (lambda: to_torch_sparse(BlockMask.from_layout(torch.eye(2, dtype=torch.bool)[:, :, None], block=16)),
         ValueError, "a sparse tensor must hold a single pattern; got a mask with 2 for 1 x 2 (batch x heads): select "
         "one with head=."),
        (lambda: from_torch_sparse([]), ValueError, "got an empty list."),
        (lambda: from_torch_sparse(None), TypeError, "matrix must be a sparse tensor; got NoneType."),
        (lambda: from_torch_sparse(torch.eye(3)), TypeError, "must have the layout sparse_csr, sparse_bsr or "
         "sparse_coo; got torch.strided."),
        (lambda: from_torch_sparse(torch.eye(3).to_sparse()), TypeError, "matrix must be boolean (True: live); got "
         "torch.float32."),
        (lambda: from_torch_sparse([torch.eye(n, dtype=torch.bool).to_sparse() for n in (3, 4)]), ValueError,
         "all matrices must have one shape [Nq, Nk]; got [4, 4] and [3, 3]."),
        (lambda: from_torch_sparse(broken_csr([0, 3, 2])), ValueError,
         "crow_indices must run from 0 to 2 and not decrease; got [0, 3, 2]."),
    ],
)  # fmt: skip
def test_errors_say_what_must_hold(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()
