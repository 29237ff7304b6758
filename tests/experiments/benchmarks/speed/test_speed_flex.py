from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import noop_mask

from experiments.benchmarks.harness import Unavailable
from experiments.benchmarks.speed.cases import Case
from experiments.benchmarks.speed.patterns import PLAIN_KINDS, pattern
from experiments.benchmarks.speed.peers.flexattention import arguments, flex, flex_mask
from experiments.benchmarks.speed.run import make_inputs
from sparseflash.interop import from_flex

CASE = Case("case", "butterfly", 1, 4, 768, 16, block=64, kv_heads=2)


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_lists_and_rule_give_our_mask(kind: str) -> None:
    found = pattern(replace(CASE, kind=kind))
    made = flex_mask(found)
    assert torch.equal(from_flex(made).to_dense(), found.mask.to_dense())
    assert made.seq_lengths == (768, 768) and made.BLOCK_SIZE == (64, 64)
    assert (made.mask_mod is noop_mask) == (found.rule is None)


def test_it_is_told_the_mask_the_grouping_and_tiles_for_small_blocks() -> None:
    options = arguments(CASE, pattern(CASE))
    assert options["enable_gqa"] and options["block_mask"].BLOCK_SIZE == (64, 64)
    assert options["kernel_options"] == {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4}
    whole = replace(CASE, kind="dense", block=128, kv_heads=None)
    assert arguments(whole, pattern(whole)) == {}


def test_flex_refuses_a_cpu() -> None:
    with pytest.raises(Unavailable, match="needs a CUDA device"):
        flex(CASE, pattern(CASE), make_inputs(CASE, torch.device("cpu")))
