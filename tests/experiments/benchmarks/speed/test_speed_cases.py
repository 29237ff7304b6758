import numpy as np
import pytest
import torch
import typer

from experiments.benchmarks.speed import patterns
from experiments.benchmarks.speed.cases import BACKWARD, BOTH, CASES, FORWARD, GROUPS, Case, select, useful_flops
from experiments.benchmarks.speed.patterns import KINDS, PLAIN_KINDS, block_mask, pattern


def test_drawn_layouts_are_the_same_every_time() -> None:
    assert np.array_equal(patterns.random(64), patterns.random(64))
    assert np.array_equal(patterns.bigbird(64), patterns.bigbird(64))


def test_bigbird_has_its_global_rows_and_columns_and_three_drawn_blocks_a_row() -> None:
    layout = patterns.bigbird(32)
    assert layout[:2].all() and layout[:, :2].all()
    drawn = layout & ~patterns.local(32, 1)
    assert (drawn[2:, 2:].sum(1) <= 3).all() and drawn[2:, 2:].sum() > 32


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_a_rule_says_which_scores_of_partial_tiles_are_live(kind: str, block: int) -> None:
    found = pattern(Case(kind, kind, 1, 1, 512, 64, block=block))
    live, idx = found.mask.to_dense()[0, 0], torch.arange(512)
    if found.rule is None:
        assert torch.equal(found.mask.to_layout()[0, 0].repeat_interleave(block, 0).repeat_interleave(block, 1), live)
    else:
        assert torch.equal(live, found.rule(None, None, idx[:, None], idx))
    assert live.sum() == found.kept and live.any(1).all()


@pytest.mark.parametrize(("kind", "reach"), [("window64", 64), ("window256", 256)])
def test_windows_have_the_reach_of_their_names(kind: str, reach: int) -> None:
    idx = torch.arange(640)
    assert torch.equal(block_mask(kind, 640, 128).to_dense()[0, 0], (idx[:, None] - idx).abs() <= reach)


def test_useful_flops_count_kept_scores_only() -> None:
    case = Case("x", "causal", 2, 3, 256, 64)
    kept = pattern(case).kept
    assert kept == 256 * 257 // 2
    assert useful_flops(case, kept, FORWARD) == 4 * 64 * kept * 3 * 2
    assert useful_flops(case, kept, BACKWARD) == 2.5 * useful_flops(case, kept, FORWARD)
    assert useful_flops(case, kept, BOTH) == useful_flops(case, kept, FORWARD) + useful_flops(case, kept, BACKWARD)


def test_case_names_are_unique_and_lengths_are_whole_blocks() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.length % min(case.block, case.length) == 0 and case.kind in KINDS for case in CASES)


def test_globs_select_cases() -> None:
    chosen = select("memory-*-local, d64-dense")
    assert [case.name for case in chosen] == [
        "d64-dense", *(f"memory-{length}-local" for length in ("16k", "64k", "256k", "1m"))
    ]  # fmt: skip
    with pytest.raises(typer.BadParameter, match="--cases must match at least one of d128-dense"):
        select("nothing")


def test_groups_select_cases_and_together_hold_all() -> None:
    assert {case.name for group in GROUPS for case in select("*", groups=(group,))} == {case.name for case in CASES}
    assert {case.group for case in select("*")} == GROUPS.keys() - {"workloads"}
    assert {case.group for case in select("*", groups=("blocks", "memory"))} == {"blocks", "memory"}
    assert [case.name for case in select("*-dense", groups=("dtypes",))] == [
        "fp32-dense", "tf32-dense", "fp16-dense", "bf16-dense"
    ]  # fmt: skip
    with pytest.raises(typer.BadParameter, match=r"--group must be from masks, memory, .*; got fast\."):
        select("*", groups=("masks", "fast"))
    with pytest.raises(typer.BadParameter, match=r"the group masks alone; got --group blocks\."):
        select("*", groups=("blocks",), quick=True)


def test_a_shrunk_case_keeps_its_grouping() -> None:
    grouped, single = (Case("x", "butterfly", 1, 32, 16384, 64, kv_heads=n) for n in (8, 32))
    assert (grouped.shrunk(128, 16).heads, grouped.shrunk(128, 16).heads_of_keys) == (2, 1)
    assert single.shrunk(128, 16).heads_of_keys == 2


def test_unknown_kinds_and_ragged_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="kind must be one of dense"):
        block_mask("spiral", 256, 128)
    with pytest.raises(ValueError, match="length must be a multiple of the block; got 200"):
        block_mask("bigbird", 200, 128)
