"""FlexAttention's block lists, built for the benchmark, equal our mask."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from experiments.benchmarks.harness import Unavailable
from experiments.benchmarks.speed.cases import CASES, Case
from experiments.benchmarks.speed.patterns import KINDS, block_mask, pattern
from experiments.benchmarks.speed.peers.flexattention import arguments, block_lists, flex, flex_mask
from experiments.benchmarks.speed.peers.runner import Inputs

LENGTH, BLOCK = 768, 64


def elements(counts: Tensor | None, indices: Tensor | None, tile: Tensor) -> Tensor:
    """Dense bools [N, N]: `tile` [N, N] inside the listed blocks, false elsewhere."""
    assert counts is not None and indices is not None
    dense = torch.zeros_like(tile)
    for row, count in enumerate(counts[0, 0].tolist()):
        for column in indices[0, 0, row, :count].tolist():
            block = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
            assert not dense[block].any(), "a block must be listed once"
            dense[block] = tile[block]
    return dense


@pytest.mark.parametrize("kind", KINDS)
def test_lists_and_element_rule_give_our_dense_mask(kind: str) -> None:
    mask = flex_mask(pattern(kind, LENGTH, BLOCK))
    ours = block_mask(kind, LENGTH, BLOCK).to_dense()[0, 0]
    idx, zero = torch.arange(LENGTH), torch.zeros((), dtype=torch.int64)
    rule = mask.mask_mod(zero, zero, idx[:, None], idx[None, :]).expand(LENGTH, LENGTH)
    every = torch.ones_like(ours)
    forward = [
        elements(mask.kv_num_blocks, mask.kv_indices, rule),
        elements(mask.full_kv_num_blocks, mask.full_kv_indices, every),
    ]
    backward = [
        elements(mask.q_num_blocks, mask.q_indices, rule.T),
        elements(mask.full_q_num_blocks, mask.full_q_indices, every),
    ]
    for partial, full in (forward, [dense.T for dense in backward]):
        assert not (partial & full).any()
        assert torch.equal(partial | full, ours)


@pytest.mark.parametrize("kind", KINDS)
def test_flex_counts_the_same_blocks(kind: str) -> None:
    layout = block_mask(kind, LENGTH, BLOCK).to_dense()[0, 0]
    blocks = layout.view(LENGTH // BLOCK, BLOCK, LENGTH // BLOCK, BLOCK).any(3).any(1)
    mask = flex_mask(pattern(kind, LENGTH, BLOCK))
    assert torch.equal(mask.to_dense()[0, 0].bool(), blocks)
    assert mask.seq_lengths == (LENGTH, LENGTH) and mask.BLOCK_SIZE == (BLOCK, BLOCK)


def test_lists_are_counts_and_columns_in_order() -> None:
    counts, columns = block_lists(torch.tensor([[False, True, True], [True, False, False], [False] * 3]))
    assert counts.tolist() == [[[2, 1, 0]]] and counts.dtype == torch.int32
    assert columns[0, 0, 0, :2].tolist() == [1, 2] and columns[0, 0, 1, :1].tolist() == [0]
    assert columns.dtype == torch.int32 and columns.is_contiguous()


def test_it_is_told_the_mask_the_grouping_and_tiles_for_small_blocks() -> None:
    case = Case("case", "butterfly", 1, 4, LENGTH, 16, block=64, kv_heads=2)
    options = arguments(case, pattern("butterfly", LENGTH, 64))
    assert options["enable_gqa"] and options["block_mask"].BLOCK_SIZE == (64, 64)
    assert options["kernel_options"] == {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4}
    whole = replace(case, kind="dense", block=128, kv_heads=None)
    assert arguments(whole, pattern("dense", LENGTH, 128)) == {}


def test_flex_refuses_a_cpu() -> None:
    tensor = torch.zeros(1, 1, LENGTH, 16)
    with pytest.raises(Unavailable, match="needs a CUDA device"):
        flex(CASES[0], pattern("dense", LENGTH, BLOCK), Inputs(tensor, tensor, tensor, tensor))
