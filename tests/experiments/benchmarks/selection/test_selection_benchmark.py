"""The benchmark of choices measures what it says."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from experiments.benchmarks.selection import measure as measure_module
from experiments.benchmarks.selection.cli import SMALL, app, table
from experiments.benchmarks.selection.measure import Call, Case, calls_of, host_microseconds, index_of, live_scores
from experiments.benchmarks.speed.peers import flashattention4, flashinfer
from experiments.benchmarks.speed.peers.runner import Unavailable
from sparseflash import attention, masks
from sparseflash.interop.fa4 import BlockSparseTensors, from_fa4
from tests.experiments.benchmarks.flashinfer_stand_in import PACKAGE


def test_a_choice_has_its_blocks_and_no_future():
    mask = calls_of(SMALL[0], torch.device("cpu"))["choice"].run()
    assert mask.to_layout().sum(-1)[0, 0].tolist() == [1, 2, 2, 2, 2, 2, 2, 2]
    assert not mask.to_dense().triu(1).any()


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_the_live_scores_are_counted(case):
    index = index_of(case, torch.device("cpu"))
    if case.by_query:
        mask = masks.selected_keys(index, k_len=256, block=32, span=32, causal=True, group=2)
    else:
        mask = calls_of(case, torch.device("cpu"))["choice"].run()
    live = mask.to_dense().float().mean().item() * 256 * 256 * case.heads
    assert live_scores(case, index) == pytest.approx(live)


def test_the_host_is_timed_by_the_call():
    calls = []
    assert host_microseconds(lambda: calls.append(1), torch.device("cpu"), count=3, rounds=2) > 0
    assert len(calls) == 6


def test_the_command_writes_a_table_and_numbers(tmp_path):
    found = CliRunner().invoke(app, ["--small", "--device", "cpu", "--out", str(tmp_path)])
    assert found.exit_code == 0, found.output
    stored = json.loads((tmp_path / "selection.json").read_text())
    rows = stored["rows"]
    assert [row["call"] for row in rows][:3] == ["choice", "choice", "choice + attention, forward"] and len(rows) == 10
    assert all(row["tflops"] > 0 for row in rows if row["call"] != "choice")
    assert {"device", "torch", "triton", "flash-attn-4", "flashinfer", "commit", "command"} <= stored.keys()
    about, _, written = (tmp_path / "selection.md").read_text().partition("\n\n")
    assert f"commit {stored['commit']}, command python -m experiments.benchmarks.selection" in about
    assert written == table(rows) + "\n"


def test_a_missing_gpu_is_told(tmp_path):
    found = CliRunner().invoke(app, ["--device", "cuda:99", "--out", str(tmp_path / "none")])
    assert found.exit_code == 2 and "GPUs here; got the device 'cuda:99'" in found.output
    assert not (tmp_path / "none").exists()


def peers_of(case):
    q, k, v = (torch.randn(1, heads, case.tokens, 8) for heads in (case.heads, case.choices, case.choices))
    mask = calls_of(case, torch.device("cpu"))["choice"].run()
    return (q, k, v), mask, measure_module.peers_of(case, mask, q, k, v)


@pytest.mark.parametrize("causal", [True, False])
def test_flash_attention_4_gets_the_chosen_blocks(monkeypatch, causal):
    given = {}

    def attention(q, k, v, **options):
        given.update(options, shape=q.shape)
        return v, None

    package = flashattention4.Package(attention, BlockSparseTensors, SimpleNamespace(jit=lambda function: function))
    monkeypatch.setattr(flashattention4, "load", lambda: package)
    case = Case(512, 4, 128, 2, kv_heads=2, causal=causal, peers=True)
    (_, _, v), mask, peers = peers_of(case)
    assert torch.equal(peers["FlashAttention-4"]()(), v) and given["shape"] == (1, 512, 4, 8)
    rule = (lambda b, h, q, k: given["mask_mod"](b, h, q, k, None, None)) if causal else None
    assert torch.equal(from_fa4(given["block_sparse_tensors"], 512, 512, mask_mod=rule).to_dense(), mask.to_dense())
    with pytest.raises(Unavailable, match="blocks of 128 only"):
        peers_of(replace(case, block=64))[2]["FlashAttention-4"]()


@pytest.mark.parametrize("causal", [True, False])
def test_flashinfer_gets_the_chosen_blocks(monkeypatch, causal):
    monkeypatch.setattr(flashinfer, "load", lambda: PACKAGE)
    tensors, mask, peers = peers_of(Case(256, 4, 32, 2, kv_heads=2, causal=causal, peers=True))
    names = [name for name in peers if name.startswith(measure_module.FORWARD_ONLY)]
    assert len(names) == (2 if causal else 3)
    for name in names:
        torch.testing.assert_close(peers[name]()(), attention(*tensors, mask))


def test_a_peer_that_cannot_or_does_not_agree_is_not_timed(monkeypatch):
    case = SMALL[1]
    calls = calls_of(case, torch.device("cpu"))
    ours = "choice + attention, forward"

    def refuses():
        raise Unavailable("no such blocks")

    both = f"{ours} + backward"
    calls["the same"] = Call(calls[both].run, 1.0, is_peer=True, like=both)
    calls["other"] = Call(lambda: calls[ours].run() * 1.1, 1.0, is_peer=True, like=ours)
    calls["refuses"] = Call(refuses, 1.0, is_peer=True, like=ours)
    monkeypatch.setattr(measure_module, "calls_of", lambda case, device: calls)
    rows = measure_module.measure(case, torch.device("cpu"), round_ms=0.0, host_calls=1)
    assert [row["call"] for row in rows] == list(calls)
    assert [row.get("error") for row in rows][-3:] == [
        None, "FAILED: ValueError: differs from ours by 0.1, relative", "skipped: no such blocks"
    ]  # fmt: skip
    assert "| refuses | skipped: no such blocks |" in table(rows)
