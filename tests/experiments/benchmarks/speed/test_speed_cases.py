"""The masks, shapes and operation counts of the speed benchmark."""

import numpy as np
import pytest
import torch

from experiments.benchmarks.speed import patterns
from experiments.benchmarks.speed.cases import (
    BACKWARD,
    BOTH,
    CALL,
    CASES,
    FORWARD,
    GROUPS,
    WAYS,
    Case,
    select,
    useful_flops,
)
from experiments.benchmarks.speed.grid import TILES, grid
from experiments.benchmarks.speed.patterns import KINDS, block_mask, pattern


@pytest.mark.parametrize(
    ("kind", "percent"),
    [
        ("dense", 100.0),
        ("butterfly", 6.25),
        ("local", 6.9),
        ("bigbird", 7.6),
        ("random03", 3.0),
        ("random12", 12.9),
        ("random50", 50.0),
    ],
)
def test_layouts_of_128_blocks_have_the_stated_densities(kind: str, percent: float) -> None:
    layout = patterns.LAYOUTS[kind](128)
    assert 100 * layout.mean() == pytest.approx(percent, abs=0.06)
    assert layout.diagonal().all()


def test_drawn_layouts_are_the_same_every_time() -> None:
    assert np.array_equal(patterns.random(64), patterns.random(64))
    assert np.array_equal(patterns.bigbird(64), patterns.bigbird(64))


def test_bigbird_has_its_global_rows_and_columns_and_three_drawn_blocks_a_row() -> None:
    layout = patterns.bigbird(32)
    assert layout[:2].all() and layout[:, :2].all()
    drawn = layout & ~patterns.local(32, 1)
    assert (drawn[2:, 2:].sum(1) <= 3).all() and drawn[2:, 2:].sum() > 32


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_pattern_and_library_mask_keep_the_same_scores(kind: str, block: int) -> None:
    length = 512
    idx = torch.arange(length)
    truth = pattern(kind, length, block)
    live = truth.live(idx[:, None], idx[None, :])
    assert live.sum() == truth.kept
    assert torch.equal(live, block_mask(kind, length, block).to_dense()[0, 0])
    assert live.any(1).all()  # the plain attention of check.py relies on it


@pytest.mark.parametrize(("kind", "reach"), [("window64", 64), ("window256", 256)])
def test_windows_follow_their_element_rule(kind: str, reach: int) -> None:
    idx = torch.arange(640)
    truth = pattern(kind, 640, 128)
    expected = (idx[:, None] - idx[None, :]).abs() <= reach
    assert torch.equal(truth.live(idx[:, None], idx[None, :]), expected)
    assert not (truth.full & truth.partial).any()


def test_useful_flops_count_kept_scores_only() -> None:
    case = Case("x", "causal", 2, 3, 256, 64)
    kept = pattern("causal", 256, 128).kept
    assert kept == 256 * 257 // 2
    assert useful_flops(case, kept, FORWARD) == 4 * 64 * kept * 3 * 2
    assert useful_flops(case, kept, BACKWARD) == 2.5 * useful_flops(case, kept, FORWARD)
    assert useful_flops(case, kept, BOTH) == useful_flops(case, kept, FORWARD) + useful_flops(case, kept, BACKWARD)


def test_case_names_are_unique_and_lengths_are_whole_blocks() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.length % case.block == 0 and case.kind in KINDS for case in CASES)


def test_quick_is_the_six_masks_at_both_head_dimensions() -> None:
    quick = select("*", quick=True)
    assert len(quick) == 12
    assert all(case.passes == (FORWARD, BACKWARD) for case in quick)
    assert {(case.length, case.head_dim, case.heads) for case in quick} == {(16384, 128, 16), (16384, 64, 32)}


def test_globs_select_cases() -> None:
    chosen = select("call-*, d64-dense")
    assert [case.name for case in chosen] == ["call-dense", "call-causal", "call-butterfly", "d64-dense"]
    assert chosen[0].passes == (CALL,)
    with pytest.raises(ValueError, match="--cases must match at least one of call-dense"):
        select("nothing")


def test_groups_select_cases_and_together_hold_all() -> None:
    assert {case.name for group in GROUPS for case in select("*", groups=(group,))} == {case.name for case in CASES}
    assert {case.group for case in select("*", groups=("dims", "memory"))} == {"dims", "memory"}
    assert [case.name for case in select("*-dense", groups=("dtypes",))] == [
        "fp32-dense", "tf32-dense", "fp16-dense", "bf16-dense"
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"--group must be from calls, masks, .*; got fast\."):
        select("*", groups=("masks", "fast"))
    with pytest.raises(ValueError, match="which are none; got"):
        select("*", groups=("dims",), quick=True)


def test_the_benchmark_covers_what_it_promises() -> None:
    def values(group: str, name: str) -> set[object]:
        return {getattr(case, name) for case in CASES if case.group == group}

    assert values("masks", "kind") >= {"dense", "causal", "butterfly", "local", "bigbird", "neighborhood"}
    assert {kind for kind in values("masks", "kind") if str(kind).startswith("random")} == {
        "random03",
        "random12",
        "random50",
    }
    assert values("dims", "head_dim") == {32, 64, 96, 128, 256}
    assert min(values("lengths", "length")) == 512 and max(values("lengths", "length")) == 2**20
    assert values("dtypes", "arithmetic") == {"bfloat16", "float16", "float32", "tf32"}
    assert values("blocks", "block") == {16, 32, 64, 128}
    assert values("heads", "heads_of_keys") == {32, 8, 4, 1}
    assert {"memory-1m-local", "memory-1m-butterfly"} <= values("memory", "name")
    assert all(case.passes == WAYS for case in CASES if case.group not in ("calls", "memory"))


def test_a_shrunk_case_keeps_its_grouping() -> None:
    grouped, single = (next(case for case in CASES if case.name == f"kv{n}of32-d64-butterfly") for n in (8, 32))
    assert (grouped.shrunk(128, 16).heads, grouped.shrunk(128, 16).heads_of_keys) == (2, 1)
    assert single.shrunk(128, 16).heads_of_keys == 2


@pytest.mark.parametrize(
    ("length", "block", "sides"), [(16384, 128, (128, 128)), (65536, 128, (256, 256)), (48, 16, (4, 12))]
)
def test_images_are_as_square_as_their_tiles_allow(length: int, block: int, sides: tuple[int, int]) -> None:
    image = grid(length, block)
    assert (image.height, image.width) == sides and image.tile_height * image.tile_width == block
    assert set(TILES) == {16, 32, 64, 128}


def test_unknown_kinds_and_ragged_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="kind must be one of causal"):
        pattern("spiral", 256, 128)
    with pytest.raises(ValueError, match="length must be a multiple of the block; got 200"):
        pattern("dense", 200, 128)
