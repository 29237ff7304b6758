from itertools import pairwise

import pytest
import torch
import typer

from experiments.benchmarks.patterns.catalogue import CHOSEN, LONG, MEDIUM, PATTERNS, select
from sparseflash import BlockMask, masks

EVERY = pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
WITH_FORMULA = pytest.mark.parametrize("pattern", [p for p in PATTERNS if p.live], ids=lambda pattern: pattern.name)
TOKENS, BLOCK = 1024, 32


@WITH_FORMULA
def test_the_formula_for_flexattention_is_that_of_the_builder(pattern):
    mask = pattern.build(TOKENS, BLOCK)
    q, k = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None]
    for head in range(mask.shape[1]):
        live = pattern.live(torch.tensor(head), q, k, TOKENS, BLOCK).expand(TOKENS, TOKENS)
        assert live.dtype == torch.bool
        assert torch.equal(live, mask.to_dense()[0, head])


@WITH_FORMULA
def test_the_formula_works_on_scalars(pattern):
    q, k = torch.tensor(700), torch.tensor(650)
    live = pattern.live(torch.tensor(0), q, k, TOKENS, BLOCK)
    assert bool(live) == bool(pattern.build(TOKENS, BLOCK).to_dense()[0, 0, 700, 650])


@EVERY
def test_entries_can_be_drawn_and_written_into_a_table(pattern):
    mask = pattern.build(TOKENS, BLOCK)
    assert isinstance(mask, BlockMask) and mask.density > 0
    assert pattern.name and pattern.rule and "\n" not in pattern.name + pattern.rule
    assert len(pattern.name) <= 34 and len(pattern.rule) <= 3 * 36
    assert pattern.tokens in (LONG, MEDIUM, CHOSEN)


@EVERY
def test_only_causal_entries_say_so(pattern):
    sees_the_future = bool(pattern.build(TOKENS, BLOCK).to_dense().triu(1).any())
    assert pattern.causal != sees_the_future


NO_PATTERN = {
    "antidiagonal_scores": "gives scores, not a mask",
    "per_batch": "joins masks that exist",
    "per_head": "joins masks that exist",
    "pooled_scores": "gives scores, not a mask",
    "select_blocks": "gives lists of blocks, not a mask",
    "with_text": "adds tokens to a mask that exists",
}


def test_every_pattern_of_the_library_has_an_entry(monkeypatch):
    called = set()

    def recording(name, function):
        def record(*args, **kwargs):
            called.add(name)
            return function(*args, **kwargs)

        return record

    functions = {name: getattr(masks, name) for name in masks.__all__ if callable(getattr(masks, name))}
    for name, function in functions.items():
        monkeypatch.setattr(masks, name, recording(name, function))
    for pattern in PATTERNS:
        pattern.build(TOKENS, BLOCK)
    assert functions.keys() - called - NO_PATTERN.keys() == set(), "add an entry in patterns/entries"


def test_names_are_unique_and_groups_stand_together():
    assert len({pattern.name for pattern in PATTERNS}) == len(PATTERNS)
    groups = [pattern.group for pattern in PATTERNS]
    changes = sum(a != b for a, b in pairwise(groups))
    assert changes + 1 == len(set(groups))


def test_patterns_are_selected_by_name():
    assert select(None) == select([]) == PATTERNS
    assert [pattern.name for pattern in select(["local", "dense"])] == ["dense", "local"]
    with pytest.raises(typer.BadParameter, match=r"--only must be from dense \| causal \|.*; got locl"):
        select(["local", "locl"])
