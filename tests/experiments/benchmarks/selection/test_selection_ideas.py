import json

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask
from typer.testing import CliRunner

from experiments.benchmarks.selection import dense, ideas
from experiments.benchmarks.selection.__main__ import app
from experiments.benchmarks.selection.shapes import SMALL
from experiments.benchmarks.selection.ways import case_of, flops, live_scores
from experiments.measurements import Measurement, read
from sparseflash import BlockMask, masks

CPU = torch.device("cpu")


def run(out, *options):
    return CliRunner().invoke(app, ["ideas", "--small", "--device", "cpu", "--out", str(out), *options])


def test_every_idea_is_measured_and_a_second_run_continues(tmp_path, monkeypatch):
    first = run(tmp_path, "--idea", "DSA", "--way", "sparseflash")
    assert first.exit_code == 0, first.output
    before = {each.name: each.value for each in read(tmp_path / "selection.jsonl")[1]}
    assert set(before) == {f"selection/DSA/128/{each}/sparseflash" for each in ("choice", "forward", "both")}
    again = run(tmp_path)
    assert again.exit_code == 0, again.output
    _, measurements = read(tmp_path / "selection.jsonl")
    found = {each.name: each for each in measurements}
    assert len(found) == len(measurements)
    assert all(found[name].value == value for name, value in before.items())
    for idea in SMALL:
        for way in ("choice/sparseflash", "forward/sparseflash", "both/sparseflash", "forward/sdpa", "both/sdpa"):
            measured = found[f"selection/{idea}/128/{way}"]
            assert measured.value > 0 and (way.startswith("choice") or measured.settings["flops"] > 0)
        assert "needs a CUDA device" in found[f"selection/{idea}/128/both/fa4"].failure
        assert f"selection/{idea}/faster-from/forward/sparseflash" in found
    monkeypatch.setattr(ideas, "measure", lambda *_: 1 / 0)
    assert run(tmp_path).exit_code == 0


def test_nothing_is_begun_without_time(tmp_path):
    found = run(tmp_path, "--minutes", "0")
    assert (
        found.exit_code == 0
        and "no time for 12 more, from NSA at 128 tokens (sparseflash, sdpa, fa4) to VSA" in found.output
    )
    assert read(tmp_path / "selection.jsonl")[1] == []


def test_a_file_of_another_commit_is_not_continued(tmp_path):
    run(tmp_path, "--minutes", "0")
    path = tmp_path / "selection.jsonl"
    run_line, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({"run": json.loads(run_line)["run"] | {"commit": "another"}}), *rest]) + "\n")
    found = run(tmp_path)
    assert found.exit_code == 2 and "--out has measurements of another commit, another" in " ".join(
        found.output.replace("│", " ").split()
    )


def ms(idea, tokens, way, value):
    return Measurement(f"selection/{idea}/{tokens}/forward/{way}", value, None, "ms", failure="" if value else "none")


def test_the_length_from_which_an_idea_is_faster():
    given = [
        *(ms("A", n, "sparseflash", value) for n, value in ((1, 1.0), (2, 5.0), (4, 3.0), (8, 4.0))),
        ms("A", 8, "sparseflash-recorded", 3.5), ms("A", 2, "sparseflash-by-mask", 0.1),
        *(ms("A", n, "sdpa", value) for n, value in ((1, 2.0), (2, 4.0), (4, 3.5), (8, 9.0))),
        *(ms("A", n, "fa4", value) for n, value in ((4, 3.1), (8, 3.6), (16, None))),
        ms("A", 8, "flex-given-the-choice", 0.1),  # it is not dense
        ms("B", 8, "sparseflash", 2.0), ms("B", 8, "sdpa", 1.0),
        ms("C", 8, "sparseflash", 2.0),
    ]  # fmt: skip
    assert list(ideas.crossings(given)) == [
        ("A/faster-from/forward/sparseflash", 4, "tokens", ""),
        ("B/faster-from/forward/sparseflash", None, "tokens", "not up to 8 tokens"),
    ]


@pytest.mark.parametrize("idea", SMALL)
def test_live_scores_are_those_of_the_mask(idea):
    case = case_of(SMALL[idea], 128, CPU, torch.float32)
    chosen = case.choice()()
    if isinstance(chosen, BlockMask):
        want = chosen.to_dense().sum() * (2 if chosen.shape[1] == 1 else 1)
    else:
        span = getattr(case.layer, "block", getattr(case.layer, "span", 1))
        heads = SMALL[idea].heads
        mask = masks.selected_keys(chosen, k_len=128, block=16, span=span, causal=True, group=heads // chosen.shape[1])
        want = mask.to_dense().sum() * (heads // mask.to_dense().shape[1])
        if idea == "NSA":
            t = torch.arange(128)
            near = (t <= t[:, None]) & (t > t[:, None] - 32)
            past = t[:15] * 8 + 15 <= t[:, None]
            want = want + heads * (near.sum() + past.sum())
    assert live_scores(case, chosen) == want


def test_spans_are_attended_by_a_mask_too():
    case = case_of(SMALL["QSA"], 128, CPU, torch.float32)
    want = case.attend()
    case.layer.backend = "blockwise"
    torch.testing.assert_close(case.attend(), want)
    with pytest.raises(Exception, match="hopper"):  # it needs a GPU
        case.attend_by_mask()
    assert case.layer.backend is None


def test_flops_are_two_products_forward_and_five_more_backward():
    assert flops(10, 64, 64) == {"forward": 2.0 * 2 * 64 * 10, "both": 2.0 * 7 * 64 * 10}
    assert flops(1, 192, 128) == {"forward": 640.0, "both": 640.0 + 2 * (3 * 192 + 2 * 128)}


@pytest.mark.parametrize("idea", ["MoBA", "MSA", "QSA"])
def test_flex_attention_is_told_what_was_chosen(idea):
    case = case_of(SMALL[idea], 128, CPU, torch.float32)
    chosen = case.choice()()
    span = getattr(case.layer, "block", getattr(case.layer, "span", 1))
    heads = SMALL[idea].heads
    flex = dense._of_lists(chosen, heads, 128, span)
    want = masks.selected_keys(chosen, k_len=128, block=16, span=span, causal=True, group=heads // chosen.shape[1])
    assert torch.equal(create_mask(flex.mask_mod, 1, heads, 128, 128, "cpu"), want.to_dense().expand(1, heads, -1, -1))
    assert flex.to_dense().bool().all()  # one tile
    many = dense._of_lists(torch.tensor([[[[0]] * 128 + [[2]] * 128 + [[-1]] * 128]]), 1, 384, 128 if span > 4 else 64)
    assert many.to_dense()[0, 0].tolist() == [[1, 0, 0], [0, 0, 0] if span > 4 else [0, 1, 0], [0, 0, 0]]
