from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from experiments.benchmarks.harness import Unavailable
from experiments.benchmarks.selection import blocks as selection
from experiments.benchmarks.selection.__main__ import app
from experiments.benchmarks.selection.blocks import SMALL, Case, index_of, live_scores, ways_of
from experiments.benchmarks.speed.peers import flashattention4, flashinfer
from experiments.benchmarks.timing import host_microseconds
from experiments.measurements import read
from sparseflash import attention, masks
from sparseflash.interop.fa4 import BlockSparseTensors, from_fa4
from tests.experiments.benchmarks.flashinfer_stand_in import PACKAGE


def test_a_choice_has_its_blocks_and_no_future():
    mask = ways_of(SMALL[0], torch.device("cpu"))["choice/sparseflash"].call()
    assert mask.to_layout().sum(-1)[0, 0].tolist() == [1, 2, 2, 2, 2, 2, 2, 2]
    assert not mask.to_dense().triu(1).any()


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_the_live_scores_are_counted(case):
    index = index_of(case, torch.device("cpu"))
    if case.by_query:
        mask = masks.selected_keys(index, k_len=256, block=32, span=32, causal=True, group=2)
    else:
        mask = ways_of(case, torch.device("cpu"))["choice/sparseflash"].call()
    live = mask.to_dense().float().mean().item() * 256 * 256 * case.heads
    assert live_scores(case, index) == pytest.approx(live)


def test_the_host_is_timed_by_the_call():
    calls = []
    assert host_microseconds(lambda: calls.append(1), torch.device("cpu"), count=3, rounds=2) > 0
    assert len(calls) == 6


def test_the_command_records_every_way(tmp_path):
    found = CliRunner().invoke(app, ["blocks", "--small", "--device", "cpu", "--out", str(tmp_path)])
    assert found.exit_code == 0, found.output
    run, measurements = read(tmp_path / "selection.jsonl")
    names = [each.name.partition("/")[2] for each in measurements]
    assert names[:3] == [
        "256-heads2of2-causal-2x32-a-block/choice/sparseflash",
        "256-heads2of2-causal-2x32-a-block/host/choice/sparseflash",
        "256-heads4of2-causal-2x32-a-block/choice/sparseflash",
    ]
    assert len(names) == 20 and all(each.value > 0 for each in measurements)
    assert all(each.settings["flops"] > 0 for each in measurements if each.unit == "ms" and "choice" not in each.name)
    assert {"torch", "triton", "flash-attn-4", "flashinfer-python"} <= run.versions.keys()
    assert run.command.startswith("python -m experiments.benchmarks.selection")


def test_a_missing_gpu_is_told(tmp_path):
    found = CliRunner().invoke(app, ["blocks", "--device", "cuda:99", "--out", str(tmp_path / "none")])
    assert found.exit_code == 2 and ("no CUDA device" in found.output or "got the device 'cuda:99'" in found.output)
    assert not (tmp_path / "none").exists()


def peers_of(case):
    q, k, v = (torch.randn(1, heads, case.tokens, 8) for heads in (case.heads, case.choices, case.choices))
    mask = ways_of(case, torch.device("cpu"))["choice/sparseflash"].call()
    return (q, k, v), mask, selection.peers_of(case, mask, q, k, v)


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
    assert torch.equal(peers["fa4"]()(), v) and given["shape"] == (1, 512, 4, 8)
    rule = (lambda b, h, q, k: given["mask_mod"](b, h, q, k, None, None)) if causal else None
    assert torch.equal(from_fa4(given["block_sparse_tensors"], 512, 512, mask_mod=rule).to_dense(), mask.to_dense())
    with pytest.raises(Unavailable, match="blocks of 128 only"):
        peers_of(replace(case, block=64))[2]["fa4"]()


@pytest.mark.parametrize("causal", [True, False])
def test_flashinfer_gets_the_chosen_blocks(monkeypatch, causal):
    monkeypatch.setattr(flashinfer, "load", lambda: PACKAGE)
    tensors, mask, peers = peers_of(Case(256, 4, 32, 2, kv_heads=2, causal=causal, peers=True))
    names = [name for name in peers if name.startswith(selection.FORWARD_ONLY)]
    assert len(names) == (2 if causal else 3)
    for name in names:
        torch.testing.assert_close(peers[name]()(), attention(*tensors, mask))
