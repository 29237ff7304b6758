"""The benchmark of a compiled layer times what it says."""

import json
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from typer.testing import CliRunner

from experiments.benchmarks.layer.cli import app
from experiments.benchmarks.layer.measure import Row, run_case, step_of, table
from experiments.benchmarks.layer.model import Layer
from experiments.benchmarks.speed.cases import Case
from experiments.benchmarks.speed.inputs import Options, make_inputs
from experiments.benchmarks.speed.patterns import pattern
from experiments.benchmarks.speed.peers import PEERS, ours
from experiments.benchmarks.speed.peers.runner import Runner
from sparseflash import attention

CPU = torch.device("cpu")
CASE = Case("small", "butterfly", 1, 2, 128, 16, dtype=torch.float32, block=32)
OPTIONS = Options(CPU, rounds=1, round_ms=0.0)


@pytest.fixture(autouse=True)
def one_graph_without_code(monkeypatch):
    """Dynamo's and autograd's graphs, run as they are: to make code of them takes seconds, and is PyTorch's part."""
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
    inputs = make_inputs(CASE, OPTIONS)
    by_tokens = Runner(
        lambda q, k, v: attention(*(each.transpose(1, 2) for each in (q, k, v))).transpose(1, 2),
        inputs,
        to_bhnd=lambda tensor: tensor.transpose(1, 2),
    )
    found = [step_of("any", runner, CASE, CPU, 0)() for runner in (by_tokens, Runner(attention, inputs))]
    torch.testing.assert_close(*found)


def test_a_step_has_the_gradients_of_eager_code_and_leaves_none_behind():
    live = pattern(CASE.kind, CASE.length, CASE.block)
    step = step_of("ours", ours(CASE, live, make_inputs(CASE, OPTIONS)), CASE, CPU, 0)
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
            make_inputs(CASE, OPTIONS),
            context=partial(sdpa_kernel, backend),
        )
        step_of("sdpa", runner, CASE, CPU, 0)()
    assert counter.frame_count == 2


def test_another_function_is_not_timed(monkeypatch):
    monkeypatch.setitem(PEERS, "dense", lambda case, live, inputs: Runner(attention, inputs))
    mine, reference, other, missing = run_case(CASE, ["reference", "dense", "sdpa-cudnn"], OPTIONS)
    assert mine.status == reference.status == "ok" and reference.ratio == pytest.approx(reference.ms / mine.ms)
    assert other.status == "DIFFERS" and other.ms is None and other.difference > 0.03
    assert missing.status == "skipped" and "dense and causal masks only" in missing.reason


def test_the_table_says_why_a_number_is_missing():
    rows = [Row("small", "ours", ms=2.0), Row("small", "flex", "FAILED"), Row("small", "fa4", "skipped")]
    assert table(rows, [CASE]).splitlines()[-1] == "| butterfly | 16 | 2.00 | FAILED | - |"


def test_the_command_writes_a_table_and_numbers(tmp_path):
    arguments = [
        "--device",
        "cpu",
        "--length",
        "128",
        "--rounds",
        "1",
        "--cases",
        "d64-butterfly",
        "--out",
        str(tmp_path),
    ]
    found = CliRunner().invoke(app, [*arguments, "--peers", "none"])
    assert found.exit_code == 0, found.output
    (row,) = json.loads((tmp_path / "layer.json").read_text())["rows"]
    assert row["status"] == "ok" and row["ms"] > 0 and row["peer"] == "ours"
    assert (tmp_path / "layer.md").read_text().splitlines()[-1].startswith("| butterfly | 64 |")


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
    assert found.exit_code == 2 and message in found.output
    assert not (tmp_path / "none").exists()
