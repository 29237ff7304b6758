from itertools import cycle

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from experiments.benchmarks.harness import Bench, deadline
from experiments.benchmarks.huggingface import generation, implementations, measure
from experiments.benchmarks.huggingface.__main__ import app
from experiments.benchmarks.huggingface.exactness import Truth, Yardstick, results_of, worst
from experiments.benchmarks.huggingface.generation import DYNAMIC, SAME, STATIC, Way
from experiments.benchmarks.huggingface.implementations import OURS, with_attention
from experiments.benchmarks.huggingface.measure import ERROR, FORWARD, STEP, Options
from experiments.benchmarks.huggingface.shapes import GENERATED, SHAPES
from experiments.measurements import Measurement, Run, read
from sparseflash import huggingface, masks
from sparseflash.testing import compare_results

pytest.importorskip("transformers", minversion="5.17")

CPU = torch.device("cpu")
BY_NAME = {shape.name: shape for shape in SHAPES}
SMALL = Options(tokens=40, batch=2, small=True)


@pytest.fixture
def bench(tmp_path):
    return Bench("huggingface", Run("CPU", "", {}, "", "", ""), tmp_path, CPU, rounds=1)


def failures(bench):
    return {(each.way, each.name.split("/")[-2]): each.failure for each in bench.measurements}


def made(name, dtype=torch.float32, tokens=70):
    shape = BY_NAME[name]
    model = shape.made(dtype, CPU, tokens=tokens, small=True, check=True)
    return model, lambda seed: shape.inputs(model, CPU, tokens=tokens, batch=2, seed=seed)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [pytest.param(*each, id=each[0].name) for each in zip(SHAPES, cycle([torch.bfloat16, torch.float32]))],
)
def test_every_model_is_exact_with_this_attention(shape, dtype, bench):
    measure.exactness(bench, shape, [OURS], SMALL, dtype)
    (found,) = bench.measurements
    assert found.failure == "" and found.value <= 1, found


def test_another_function_is_not_exact():
    model, inputs = made("llama")
    yardstick = Yardstick.of(model, inputs)
    huggingface.register(masks.local(70, window=101, block=16), name="near")  # without the farthest tokens
    what, ratio = worst(yardstick.compare(with_attention(model, "near")))
    assert ratio > 100 and what in yardstick.truth
    assert yardstick.compare(with_attention(model, OURS)).exact


def test_a_compiled_model_is_compared_as_it_is_called():
    torch.compiler.reset()  # PyTorch limits how often it compiles a function
    model, inputs = made("llama")
    yardstick, ours = Yardstick.of(model, inputs), with_attention(model, OURS)
    graphs = CompileCounter()
    found = yardstick.compare(ours, call=torch.compile(ours, backend=graphs))
    assert found.exact and graphs.frame_count > 1


def test_the_truth_is_in_fp64_also_where_models_ask_for_fp32_by_name():
    """In fp32 the change of the loss would be less than its rounding."""
    model, inputs = made("llama")
    wide, step, name = model.double(), 1e-6, "model.layers.0.self_attn.q_proj.weight"
    before, _ = Truth(wide)(inputs(0))
    with torch.no_grad():
        dict(wide.named_parameters())[name][0, 0] += step
    after, _ = Truth(wide)(inputs(0))
    labels = inputs(0)["labels"][:, 1:].flatten()
    losses = [cross_entropy(each["logits"][:, :-1].flatten(0, 1), labels) for each in (before, after)]
    torch.testing.assert_close((losses[1] - losses[0]) / step, before[name][0, 0], rtol=1e-4, atol=0.0)


def test_gradients_of_biases_that_cancel_are_judged_by_their_summands():
    model, inputs = made("bert")
    truth, magnitudes = Truth(model)(inputs(0))
    name = "bert.encoder.layer.0.attention.self.key.bias"
    assert truth[name].abs().max() < 1e-10 < 1e-6 < magnitudes[name]


def test_gradients_that_are_zero_may_have_the_errors_of_pytorchs_own_attention():
    model, inputs = made("bert", torch.bfloat16)
    yardstick = Yardstick.of(model, inputs)
    ours = yardstick.compare(with_attention(model, OURS)).ratios
    zeros = [name for name in ours if name.endswith("key.bias")]
    assert len(zeros) == 2
    eager = {name: float(results_of(model, inputs(0))[name].abs().max()) for name in zeros}
    for name in zeros:
        assert yardstick.plain[name] > 2 * eager[name] and 0 < ours[name] <= 1, name
        damaged = {each: x + (each == name) * yardstick.magnitudes[name] for each, x in yardstick.truth.items()}
        assert (
            compare_results(damaged, yardstick.truth, yardstick.plain, magnitudes=yardstick.magnitudes).ratios[name] > 5
        )


def test_the_models_of_a_comparison_share_their_weights():
    model, _ = made("t5")
    other = with_attention(model, OURS)
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert (model.config._attn_implementation, other.config._attn_implementation) == ("eager", "block_sparse")


def test_the_windows_of_a_comparison_are_shorter_than_its_sequences():
    for name in ("gemma2", "gpt-oss"):
        assert made(name)[0].config.sliding_window < measure.CHECKED_TOKENS // 2


def test_what_cannot_run_is_recorded_with_its_reason(monkeypatch, bench):
    from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

    # Older versions leave out the soft cap.
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", False)
    measure.measure(bench, BY_NAME["gemma2"], ["eager", "sdpa", "nothing", OURS], SMALL, torch.float32)
    found = failures(bench)
    assert "does not support" in found["sdpa", ERROR] and "does not support" in found["sdpa", STEP]
    assert found["nothing", FORWARD] != ""
    assert found[OURS, ERROR] == found[OURS, FORWARD] == found[OURS, STEP] == found["eager", STEP] == ""


def test_a_training_step_without_memory_leaves_the_forward(monkeypatch, bench):
    monkeypatch.setattr(measure, "_training_step", lambda model, inputs: fails)
    measure.speed(bench, BY_NAME["bert"], ["sdpa", OURS], SMALL, torch.float32)
    found = failures(bench)
    assert [found[name, what] for name in ("sdpa", OURS) for what in (FORWARD, STEP)] == ["", "out of memory"] * 2
    assert all(each.value > 0 and each.settings["items"] == 80 for each in bench.measurements if each.unit == "ms"
               and not each.failure)  # fmt: skip


def test_what_would_damage_the_others_does_not_run(bench):
    measure.measure(bench, BY_NAME["t5"], ["eager", "flex_attention"], SMALL, torch.float32)
    found = {what: why for (name, what), why in failures(bench).items() if name == "flex"}
    assert found.keys() == {ERROR, FORWARD, STEP} and all("to other memory" in each for each in found.values())


def fails():
    raise torch.OutOfMemoryError("of 80 GiB")


def test_nothing_begins_after_the_time_is_over(bench):
    late = Options(small=True, late=deadline(-1.0))
    measure.measure(bench, BY_NAME["llama"], ["eager", OURS], late, torch.float32)
    found = failures(bench)
    assert {*found.values()} == {"out of time"} and {what for _, what in found} == {ERROR, FORWARD, STEP}


def test_an_inexact_model_is_named():
    errors = {f"llama/{ERROR}/{OURS}": 1.5, f"bert/{ERROR}/{OURS}": 0.5, f"t5/{ERROR}/sdpa": 9.0}
    assert measure.inexact([Measurement(f"huggingface/{name}", x, None, "1") for name, x in errors.items()]) == [
        "llama"
    ]


@pytest.mark.parametrize(("name", "count"), [("t5", 2 * (40 + 10)), ("llama", 2 * 40), ("swin", 2)])
def test_rates_count_what_a_batch_has(name, count):
    _, inputs = made(name, tokens=40)
    assert BY_NAME[name].count(inputs(0)) == count


def test_generated_tokens_are_compared_with_those_of_eager():
    model = GENERATED.made(torch.float32, CPU, tokens=140, small=True, check=False)
    huggingface.register(masks.local(140, window=9, causal=True, block=16), name="near")
    found = generation.same_tokens(model, [Way(OURS, DYNAMIC), Way(OURS, STATIC), Way("near", DYNAMIC)])
    assert [*found.values()][:2] == [SAME, SAME]
    assert found["near, dynamic cache"].startswith("differ from token ")


def test_the_command_measures_models(tmp_path):
    options = ["--small", "--device", "cpu", "--tokens", "40", "--batch", "2", "--rounds", "1", "--out", str(tmp_path)]
    chosen = ["--model", "llama", "--model", "swin", "--implementation", "eager", "--implementation", OURS]
    found = CliRunner().invoke(app, ["models", *options, *chosen])
    assert found.exit_code == 0, found.output
    run, measurements = read(tmp_path / "huggingface.jsonl")
    assert "transformers" in run.versions and not [each for each in measurements if each.failure]
    names = [each.name.removeprefix("huggingface/") for each in measurements]
    assert [name for name in names if "first-" not in name] == [
        f"{model}/{what}"
        for model in ("llama", "swin")
        for what in (f"{ERROR}/{OURS}", f"{FORWARD}/eager", f"{STEP}/eager", f"{FORWARD}/{OURS}", f"{STEP}/{OURS}")
    ]


def test_a_model_that_is_not_exact_ends_the_command_with_1(tmp_path, monkeypatch):
    def broken(model, name):
        made = with_attention(model, name)
        made.register_forward_pre_hook(lambda module, args, given: (args, given | {"position_ids": torch.zeros(
            given["input_ids"].shape, dtype=torch.long)}), with_kwargs=True)  # fmt: skip
        return made

    monkeypatch.setattr(measure, "with_attention", broken)
    options = ["--small", "--device", "cpu", "--tokens", "40", "--rounds", "1", "--out", str(tmp_path)]
    found = CliRunner().invoke(app, ["models", *options, "--model", "llama", "--implementation", OURS])
    assert found.exit_code == 1 and "not exact: llama" in found.output


def test_the_command_generates(tmp_path):
    options = ["--small", "--device", "cpu", "--prompt", "40", "--batch", "2", "--new", "4", "--rounds", "1"]
    found = CliRunner().invoke(app, ["generate", *options, "--out", str(tmp_path)])
    assert found.exit_code == 0, found.output
    measurements = read(tmp_path / "generate.jsonl")[1]
    caches = [f"{cache}/{name}" for cache in ("dynamic-cache", "static-cache") for name in ("sdpa", OURS)]
    units = {"same-tokens/": "tokens", "2x40-first/": "s", "2x40-prompt/": "ms", "2x40/": "ms"}
    assert {each.name.removeprefix("generate/"): each.unit for each in measurements} == {
        f"{what}{way}": unit for what, unit in units.items() for way in caches
    }
    assert all(each.value > 0 for each in measurements)


def test_what_cannot_generate_is_recorded_with_its_reason(bench):
    model = GENERATED.made(torch.float32, CPU, tokens=60, small=True, check=False)
    ways = [Way("nothing", DYNAMIC), Way(OURS, STATIC), Way(OURS, DYNAMIC)]
    huggingface.register(masks.local(41, window=9, causal=True, block=16), name="short")
    ways.append(Way("short", DYNAMIC))
    generation.measure(bench, model, ways, 40, 1, new=3, late=lambda: False)
    found = {each.name.removeprefix("huggingface/1x40/"): each.failure for each in bench.measurements}
    assert [bool(found[way.path]) for way in ways] == [True, False, False, True]
    assert "as long as a row of the batch" in found[ways[3].path]
    bench.measurements.clear()
    generation.measure(bench, model, ways[2:3], 40, 1, new=3, late=lambda: True)
    assert [each.failure for each in bench.measurements] == ["out of time"] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [(["models", "--model", "llma", "--device", "cpu"], "must be from llama, gpt2"), (["models"], "no CUDA device")],
)
def test_what_is_wrong_with_the_options_is_told(options, message):
    found = CliRunner().invoke(app, options)
    assert found.exit_code == 2 and message in " ".join(found.output.replace("│", " ").split())


def test_flash_attention_is_offered_only_where_it_is_installed(monkeypatch):
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr("transformers.utils.is_flash_attn_3_available", lambda: False)
    assert implementations.available() == ["eager", "sdpa", "flex_attention", "flash_attention_2", OURS]
