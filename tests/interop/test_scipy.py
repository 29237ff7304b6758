import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from sparseflash import BlockMask, masks
from sparseflash.interop import from_scipy, to_scipy
from tests.drawn.masks import block_masks, blocks, dense_masks, lengths


def canonical(mask, *, like=None):
    block = (mask.block_q, mask.block_k) if like is None else like
    return BlockMask.from_dense(mask.to_dense(), block=block)


@given(mask=block_masks(batch=2, heads=3), data=st.data())
def test_a_matrix_has_the_live_scores_of_its_head(mask, data):
    dense = mask.to_dense()
    b, h = (data.draw(st.integers(0, size - 1)) for size in dense.shape[:2])
    matrix = to_scipy(mask, batch=b, head=h)
    assert matrix.format == "csr" and matrix.dtype == np.bool_ and matrix.has_canonical_format
    assert np.array_equal(matrix.toarray(), dense[b, h].numpy())
    assert from_scipy(matrix, block=(mask.block_q, mask.block_k)) == BlockMask.from_dense(
        dense[b, h], block=(mask.block_q, mask.block_k)
    )


@given(block=blocks(), rows=st.integers(1, 4), cols=st.integers(1, 4), data=st.data())
def test_a_bsr_matrix_has_the_tiles_as_blocks(block, rows, cols, data):
    dense = data.draw(dense_masks(rows * block[0], cols * block[1], 1, 1, block))
    mask = BlockMask.from_dense(dense, block=block)
    matrix = to_scipy(mask, format="bsr")
    assert matrix.format == "bsr" and matrix.blocksize == block and matrix.dtype == np.bool_
    assert matrix.indptr.tolist() == mask.indptr.tolist() and matrix.indices.tolist() == mask.indices.tolist()
    assert np.array_equal(matrix.toarray(), dense[0, 0].numpy())
    assert from_scipy(matrix) == mask


@pytest.mark.filterwarnings("ignore:Constructing a DIA matrix")  # with many diagonals: SciPy's advice, not ours
@given(
    dense=st.tuples(lengths(70), lengths(70)).flatmap(lambda n: dense_masks(*n, 1, 1, (16, 16))),
    block=blocks((16, 32)),
    format=st.sampled_from(["csr", "csc", "coo", "lil", "dok", "dia"]),
)
def test_every_format_comes_in(dense, block, format):
    matrix = sparse.coo_array(dense[0, 0].numpy()).asformat(format)
    assert from_scipy(matrix, block=block) == BlockMask.from_dense(dense[0, 0], block=block)


@given(mask=block_masks(batch=1, heads=3))
def test_a_list_of_matrices_is_a_list_of_heads(mask):
    matrices = [to_scipy(mask, head=h) for h in range(mask.shape[1])]
    block = (mask.block_q, mask.block_k)
    assert from_scipy(matrices, block=block) == canonical(mask)


def test_blocks_that_no_mask_can_have_come_in_through_their_scores():
    dense = torch.rand(60, 90) < 0.3
    matrix = sparse.bsr_array(dense.numpy(), blocksize=(3, 5))
    assert from_scipy(matrix) == BlockMask.from_dense(dense, block=128)
    assert from_scipy(matrix, block=32) == BlockMask.from_dense(dense, block=32)
    whole = sparse.bsr_array(dense[:32, :32].numpy(), blocksize=(16, 16))
    assert from_scipy(whole, block=32) == BlockMask.from_dense(dense[:32, :32], block=32)


def test_stored_false_entries_and_duplicates_do_no_harm():
    data = np.array([True, False, True, True, False])
    matrix = sparse.coo_array((data, ([0, 1, 2, 2, 2], [0, 1, 2, 2, 2])), shape=(20, 20))
    for given_matrix in (matrix, matrix.tocsr(), sparse.csr_array((data, [0, 1, 0, 0, 1], [0, 1, 1, 4, 5, *[5] * 15]))):
        want = torch.from_numpy(given_matrix.toarray())
        assert from_scipy(given_matrix, block=16) == BlockMask.from_dense(want, block=16)
    tiles = np.zeros((2, 16, 16), dtype=bool)
    tiles[0, 3, 4] = tiles[1, 3, 4] = tiles[1, 5, 6] = True
    twice = sparse.bsr_array((tiles, np.array([0, 0]), np.array([0, 2])), shape=(16, 16))
    before = twice.data.copy()
    mask = from_scipy(twice)
    assert mask.to_dense()[0, 0].nonzero().tolist() == [[3, 4], [5, 6]]
    assert np.array_equal(twice.data, before), "what the caller gave must stay as it was"


def test_old_matrices_come_in_as_arrays_do():
    dense = torch.rand(40, 40) < 0.5
    assert from_scipy(sparse.csr_matrix(dense.numpy()), block=16) == BlockMask.from_dense(dense, block=16)


def test_131072_tokens_go_and_come_without_n_by_n():
    i = torch.arange(8192)
    mask = BlockMask.from_tiles(i, i, 131_072, block=16)
    matrix = to_scipy(mask)
    assert matrix.nnz == 131_072 * 16
    assert from_scipy(matrix, block=16) == mask


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: to_scipy(masks.causal(32), format="csc"), ValueError, 'format must be "csr" or "bsr"; got \'csc\''),
        (lambda: to_scipy(masks.causal(100), format="bsr"), ValueError, "a BSR matrix must consist of whole blocks; "
         "got 100 x 100 tokens in blocks of 128 x 128. Use format=\"csr\"."),
        (lambda: to_scipy(several()), ValueError, "a matrix must hold a single pattern; got a mask with 4 for 2 x 3 "
         "(batch x heads): select one with batch= and head=."),
        (lambda: to_scipy(several(), batch=0), ValueError, "with 2 for 1 x 3 (batch x heads): select one with head=."),
        (lambda: to_scipy(several(), batch=2, head=0), ValueError, "batch must lie in 0..1; got 2."),
        (lambda: to_scipy(several(), batch=0, head=-1), ValueError, "head must lie in 0..2; got -1."),
        (lambda: from_scipy([]), ValueError, "got an empty list."),
        (lambda: from_scipy(np.eye(3)), TypeError, "matrix must be a scipy.sparse matrix; got ndarray."),
        (lambda: from_scipy(sparse.eye_array(3)), TypeError, "matrix must be boolean (True: live); got float64. Choose "
         "what is live: matrix != 0."),
        (lambda: from_scipy([sparse.eye_array(3, dtype=bool), sparse.eye_array(4, dtype=bool)]), ValueError,
         "all matrices must have one shape [Nq, Nk]; got (4, 4) and (3, 3)."),
        (lambda: from_scipy(sparse.eye_array(3, dtype=bool), block=7), ValueError, "block must be one of 16"),
    ],
)  # fmt: skip
def test_errors_say_what_must_hold(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def several():
    layout = torch.zeros(2, 3, 2, 2, dtype=torch.bool)
    layout[0, 1, 0, 0] = layout[1, 0, 1, 0] = layout[1, 2, 1, 1] = layout[1, 1, 1, 0] = True
    return BlockMask.from_layout(layout, block=16)


def test_a_mask_with_lengths_gives_the_scores_before_them():
    mask = BlockMask.dense(40, block=16).with_lengths(torch.tensor([10, 40, 0]))
    for b, stop in enumerate([10, 40, 0]):
        assert to_scipy(mask, batch=b).nnz == stop**2
    with pytest.raises(ValueError, match=re.escape("select one with batch=.")):
        to_scipy(mask)
    with pytest.raises(ValueError, match="lengths must have at least one sequence"):
        to_scipy(mask.with_lengths(torch.zeros(0, dtype=torch.int64)))
