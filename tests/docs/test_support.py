import re

import pytest
import torch

from docs import support as told
from docs.calls import SCORES
from sparseflash import explain, masks, scores
from sparseflash.backends.triton.hopper import support


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.setattr(support, "is_interpreted", lambda: False)


def test_the_page_has_the_answers_of_the_library():
    page = told.PAGE.read_text(encoding="utf-8")
    assert told.written(page) == page, "python -m docs.support rewrites the tables"


def test_the_page_does_not_depend_on_the_installed_triton(monkeypatch):
    page = told.PAGE.read_text(encoding="utf-8")
    for version in ((3, 6), (3, 9)):
        monkeypatch.setattr(support, "triton_version", lambda version=version: version)
        assert told.written(page) == page
    assert "| portable, from Triton 3.8 **Hopper** |" in page


def test_the_page_shows_every_table():
    shown = [name for _, name, _ in told.TABLE.findall(told.PAGE.read_text(encoding="utf-8"))]
    assert sorted(shown) == sorted(told.TABLES)


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("change", [None, scores.softcap(30.0), scores.alibi(torch.ones(16, requires_grad=True))])
def test_answers_are_those_of_explain(compiled, dim, capability, change):
    mask = masks.local(2048, window=512, causal=True)
    q = torch.empty(1, 16, 2048, dim, dtype=torch.bfloat16, device="meta")
    found = explain(q, q, q, mask, scores=change, capability=capability)
    answer = told.asked(mask, dims=(dim, dim), capability=capability, tokens=2048, change=change)
    assert answer[:2] == tuple(told.named(each.family) for each in (found.forward, found.backward))
    reasons = dict.fromkeys(reason for each in (found.forward, found.backward) for _, reason in each.refusals)
    assert answer[2].lower() == "<br>".join(reasons).lower()


def test_a_table_that_differs_is_noticed(compiled):
    page = told.PAGE.read_text(encoding="utf-8")
    changed = re.sub(r"^\| dropout \| portable", "| dropout | **Hopper**", page, flags=re.MULTILINE)
    assert changed != page and told.written(changed) == page


def test_rows_cover_every_score_modification_that_exists():
    page = told.PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", page))
    helpers = {"Scores", "clipped", "t5_buckets", "tile_values", "relative_3d"}
    assert set(scores.__all__) - helpers <= named


@pytest.mark.parametrize(
    ("features", "text"),
    [
        ([], ""),
        (["dropout", "mask by batch"], "dropout, a mask for each batch element"),
        (["mask", "mask by head", "mask by batch"], "masks"),
        (["bias", "function"], "`scores.bias`, `scores.function`"),
        (["dropout", *SCORES], "dropout, score modifications"),
        ([each for each in SCORES if each != "bias"], "score modifications (except `scores.bias`)"),
    ],
)
def test_what_a_call_does_not_take_is_said_in_few_words(features, text):
    assert told.without(features) == text
