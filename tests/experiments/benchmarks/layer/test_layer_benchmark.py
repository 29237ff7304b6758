from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from typer.testing import CliRunner

from experiments.benchmarks.harness import Bench
from experiments.benchmarks.layer import Layer, app, step_of, ways_of
from experiments.benchmarks.speed.cases import Case
from experiments.benchmarks.speed.patterns import pattern
from experiments.benchmarks.speed.peers import PEERS, ours
from experiments.benchmarks.speed.peers.runner import Runner
from experiments.benchmarks.speed.run import make_inputs
from experiments.measurements import Run, read
from sparseflash import attention

CPU = torch.device("cpu")
CASE = Case("small", "butterfly", 1, 2, 128, 16, dtype=torch.float32, block=32)


@pytest.fixture(autouse=True)
def one_graph_without_code(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def test_the_layer_attends_by_heads_and_keeps_its_input():
    layer = Layer(2, 16, lambda q, k, v: attention(q, k, v))
    x = torch.randn(1, 128, 32)
    q, k, v = layer.qkv(layer.norms[0](x)).view(1, 128, 3, 2, 16).unbind(2)
    heads = [torch.softmax(q[0, :, h] @ k[0, :, h].mT / 4, -1) @ v[0, :, h] for h in range(2)]
    middle = x + layer.out(torch.cat(heads, -1))
    expected = middle + layer.down(torch.nn.functional.gelu(layer.up(layer.norms[1](middle))))
    torch.testing.assert_close(layer(x), expected)


def test_a_peer_gets_its_own_order_of_tokens_and_heads():
    inputs = make_inputs(CASE, CPU)
    by_tokens = Runner(
        lambda q, k, v: attention(*(each.transpose(1, 2) for each in (q, k, v))).transpose(1, 2),
        inputs,
        to_bhnd=lambda tensor: tensor.transpose(1, 2),
    )
    found = [step_of("any", runner, CASE, CPU, 0)() for runner in (by_tokens, Runner(attention, inputs))]
    torch.testing.assert_close(*found)


def test_a_step_has_the_gradients_of_eager_code_and_leaves_none_behind():
    live = pattern(CASE)
    step = step_of("ours", ours(CASE, live, make_inputs(CASE, CPU)), CASE, CPU, 0)
    first, second = step().clone(), step()
    assert torch.equal(first, second)
    weight, by_step = step.layer.qkv.weight, step.x.grad.clone()
    weight.grad = step.x.grad = None
    step.layer(step.x).backward(step.dout)
    torch.testing.assert_close((second, by_step), (weight.grad, step.x.grad))


def test_each_backend_of_one_call_gets_a_graph_of_its_own(monkeypatch):
    counter, compiler = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **given: compiler(call, **given, backend=counter))
    torch.compiler.reset()
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        runner = Runner(
            lambda q, k, v: scaled_dot_product_attention(q, k, v),
            make_inputs(CASE, CPU),
            context=partial(sdpa_kernel, backend),
        )
        step_of("sdpa", runner, CASE, CPU, 0)()
    assert counter.frame_count == 2


def test_another_function_is_not_timed(monkeypatch, tmp_path):
    monkeypatch.setitem(PEERS, "dense", lambda case, live, inputs: Runner(attention, inputs))
    bench = Bench("layer", Run("CPU", "", {}, "", "", ""), tmp_path, CPU, rounds=1)
    bench.time("small/step", ways_of(CASE, ("reference", "dense", "sdpa-cudnn"), CPU, 0))
    mine, reference, other, missing = bench.measurements
    assert mine.value > 0 and reference.value > 0 and mine.settings["mask"] == "butterfly"
    assert other.value is None and "differs from ours by " in other.failure
    assert missing.failure.startswith("skipped: ") and "dense and causal masks only" in missing.failure


def test_if_ours_cannot_run_the_peers_are_not_timed_either(monkeypatch, tmp_path):
    def broken(*_):
        raise RuntimeError("no kernel")

    monkeypatch.setattr("experiments.benchmarks.speed.peers.ours", broken)
    bench = Bench("layer", Run("CPU", "", {}, "", "", ""), tmp_path, CPU, rounds=1)
    bench.time("small/step", ways_of(CASE, ("reference",), CPU, 0))
    assert [each.failure for each in bench.measurements] == ["RuntimeError: no kernel"] * 2


def test_the_command_records_the_steps(tmp_path):
    arguments = [
        "--device", "cpu", "--length", "128", "--rounds", "1", "--cases", "d64-butterfly", "--out", str(tmp_path),
    ]  # fmt: skip
    found = CliRunner().invoke(app, [*arguments, "--peers", "none"])
    assert found.exit_code == 0, found.output
    (found,) = read(tmp_path / "layer.jsonl")[1]
    assert found.name == "layer/butterfly/64/step/sparseflash" and found.value > 0 and found.settings["tokens"] == 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu"], "--device cpu must have a small --length"),
        (["--device", "cpu", "--length", "128", "--peers", "fa5"], "--peers must be from flex,"),
        (["--device", "cpu", "--length", "128", "--peers", "flex-autotune"], "got flex-autotune"),
    ],
)
def test_what_cannot_be_measured_is_told(arguments, message, tmp_path):
    found = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "none")])
    assert found.exit_code == 2 and message in " ".join(found.output.replace("│", " ").split())
    assert not (tmp_path / "none").exists()
