import pytest
import torch
from typer.testing import CliRunner

from experiments.benchmarks.gpt import OURS, SIZES, Case, Models, app, gradient, ways_of
from experiments.benchmarks.harness import difference
from experiments.benchmarks.speed.peers import flashattention4
from experiments.lm import flops
from experiments.measurements import read

CPU = torch.device("cpu")
TINY = Case("tiny", 128, tokens=256, window=64, block=32)


def run(folder, *arguments):
    return CliRunner().invoke(app, ["--device", "cpu", "--out", str(folder), "--commit", "abc", *arguments])


@pytest.mark.parametrize("depth", [1, SIZES["medium"][0]])
def test_all_ways_of_one_pattern_give_the_same_gradient(depth, monkeypatch):
    monkeypatch.setitem(SIZES, "tiny", (depth, *SIZES["tiny"][1:]))
    models = Models(TINY, CPU)
    dense = models.step("sparseflash").clone()
    for name in ("sdpa", "hugging-face"):
        assert difference((models.step(name),), (dense,)) < 1e-4, name
    for name in ("sparseflash-window", "sparseflash-window-butterfly"):
        assert difference((models.step(name),), (dense,)) > 1e-3, name
    assert torch.equal(models.step("sparseflash"), dense), "a step changes no weights"


def test_flash_attention_gets_its_own_layout_and_window(monkeypatch):
    calls = []

    def attention(q, k, v, **options):
        calls.append(options)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        left = options.get("window_size", (TINY.context, 0))[0]
        places = torch.arange(TINY.context)
        apart = places[:, None] - places
        live = (apart >= 0) & (apart <= left)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, live).transpose(1, 2), None

    monkeypatch.setattr(flashattention4, "load", lambda: flashattention4.Package(attention, None, None))
    models = Models(TINY, CPU)
    for name, ours in (("fa4", "sparseflash"), ("fa4-window", "sparseflash-window")):
        want = models.step(ours).clone()
        assert difference((models.step(name),), (want,)) < 1e-4, name
    assert calls[0] == {"causal": True} and calls[-1] == {"causal": True, "window_size": (63, 0)}


def test_flops_count_live_scores_alone():
    models = Models(TINY, CPU)
    sizes = TINY.sizes
    live = {name: models.mask(name).to_dense().sum().item() for name in OURS}
    for name in OURS:
        scores = sizes.depth * sizes.heads * live[name]
        assert models.flops(name) == pytest.approx(256 * flops.of_token(sizes.weights, 32, scores, 128))
    assert live["sparseflash-window"] < live["sparseflash-window-butterfly"] < live["sparseflash"] == 128 * 129 / 2
    assert models.flops("fa4-window") == models.flops("sparseflash-window")
    assert models.flops("hugging-face") == models.flops("sparseflash")


def test_the_command_goes_on_with_the_cases_that_are_missing(tmp_path):
    arguments = ["--way", "sparseflash", "--way", "sdpa", "--way", "sparseflash-window", "--way", "fa4"]
    found = run(tmp_path, *arguments, "--context", "64")
    assert found.exit_code == 0, found.output
    _, first = read(tmp_path / "gpt.jsonl")
    assert [each.name for each in first] == [f"gpt/tiny-64/step/{name}" for name in ("sparseflash", "sdpa", "fa4")]
    assert first[0].settings["items"] == 128 and "flash-attn-4 is not installed" in first[2].failure
    found = run(tmp_path, *arguments, "--context", "64", "--context", "128")
    assert found.exit_code == 0, found.output
    _, second = read(tmp_path / "gpt.jsonl")
    assert second[:3] == first and second[3].name == "gpt/tiny-128/step/sparseflash"
    assert "gpt/tiny-128/step/sparseflash-window" in [each.name for each in second]
    other = CliRunner().invoke(app, ["--device", "cpu", "--out", str(tmp_path), "--commit", "def"])
    assert other.exit_code == 2 and "measurements of another commit, abc" in " ".join(other.output.split())


def test_no_case_begins_after_the_end(tmp_path):
    found = run(tmp_path, "--minutes", "0", "--way", "sparseflash", "--context", "64", "--context", "128")
    assert found.exit_code == 0 and "tiny-128: out of time; the same command goes on" in found.output
    assert not [each for each in read(tmp_path / "gpt.jsonl")[1] if each.value is not None and "128" in each.name]


def test_a_peer_without_its_comparison_is_refused(tmp_path):
    found = run(tmp_path, "--way", "sdpa")
    assert found.exit_code == 2 and "--way sdpa is compared with sparseflash: name it, too." in found.output


@pytest.mark.gpu
def test_every_way_runs_on_a_gpu_and_agrees():
    case = Case("small", 2048, tokens=4096)
    models = Models(case, torch.device("cuda"))
    ways = ways_of(models, ["sparseflash", "sparseflash-window", "sparseflash-window-butterfly", "sdpa"])
    found = {name: way.call().float() for name, way in ways.items()}
    assert difference((found["step/sdpa"],), (found["step/sparseflash"],)) < 3e-2
    assert gradient(models.model.blocks[0].qkv.weight).abs().sum() > 0
