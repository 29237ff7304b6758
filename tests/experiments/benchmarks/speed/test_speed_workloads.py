"""Workloads: masks follow their rules, peers compute the same, and wrong results are not timed."""

from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from experiments.benchmarks.harness import Bench, Unavailable
from experiments.benchmarks.speed import workload_ways
from experiments.benchmarks.speed.__main__ import app, workload
from experiments.benchmarks.speed.peers import flashattention4
from experiments.benchmarks.speed.run import OURS
from experiments.benchmarks.speed.workload_ways import cells, fa4_options
from experiments.benchmarks.speed.workloads import KINDS, WORKLOADS
from experiments.measurements import Measurement, Run, read
from sparseflash.interop.fa4 import BlockSparseTensors, from_fa4

CPU = torch.device("cpu")
BY_KIND = {each.kind: each.shrunk() for each in reversed(WORKLOADS)}
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture
def bench(tmp_path):
    return Bench("workloads", Run("CPU", "", {}, "", "", ""), tmp_path, CPU, rounds=1)


def dense_of(rule, w):
    places = [torch.arange(n) for n in (w.batch, 1, w.queries, w.k_len)]
    b, h, q, k = (x.view([-1 if axis == number else 1 for axis in range(4)]) for number, x in enumerate(places))
    return rule(b, h, q, k)


def test_every_kind_has_a_workload_and_every_workload_a_name():
    assert BY_KIND.keys() == KINDS.keys()
    assert len({each.name for each in WORKLOADS}) == len(WORKLOADS)


@pytest.mark.parametrize("w", WORKLOADS, ids=lambda w: w.name)
def test_a_mask_is_what_its_rule_says(w):
    small = w.shrunk()
    mask, rule = KINDS[small.kind](small, CPU)
    assert (mask is None) == (rule is None) == (small.kind == "dense")
    if mask is not None:
        assert mask.shape[2:] == (small.queries, small.k_len)
        assert torch.equal(*torch.broadcast_tensors(mask.to_dense(), dense_of(rule, small)))


def test_documents_fill_the_sequence_and_padded_sequences_do_not():
    (documents,) = (each for each in WORKLOADS if each.kind == "documents")
    lengths = documents.lengths(65536)
    assert sum(lengths) == 65536 and len(lengths) == 32 and min(lengths) >= 1 and max(lengths) > 4 * min(lengths)
    small = BY_KIND["padded"]
    assert max(small.lengths(256)) == 256 > min(small.lengths(256))


@pytest.mark.parametrize("kind", KINDS)
def test_ours_is_right_and_peers_compute_the_same(kind, bench):
    w = BY_KIND[kind]
    assert workload(bench, w, ("flex", "sdpa-cudnn", "fa4"), 0)
    found = {each.name.removeprefix(f"workloads/{w.name}/"): each for each in bench.measurements}
    assert found[f"exactness/{OURS}"].value <= 1
    assert found[f"forward/{OURS}"].value > 0 and found[f"forward/{OURS}"].settings["flops"] > 0
    assert found["forward/flex"].value > 0, found["forward/flex"].failure
    assert "does not support backward on CPU" in found["backward/flex"].failure
    sdpa = found["backward/sdpa-cudnn"]
    assert sdpa.value if kind in ("dense", "causal") else "dense and causal masks only" in sdpa.failure
    assert found["forward/fa4"].failure == "skipped: needs a CUDA device"
    if kind == "documents":
        assert found[f"forward/{OURS}-varlen"].value > 0 and found[f"backward/{OURS}-varlen"].value > 0


def test_values_may_have_another_width_and_a_workload_no_backward(bench):
    for name in ("deepseek-causal-8k", "latent-causal-4k"):
        (w,) = (each.shrunk() for each in WORKLOADS if each.name == name)
        assert w.v_dim != w.dim and workload(bench, w, (), 0)
    assert [each.name.rpartition("/")[0] for each in bench.measurements] == [
        "workloads/deepseek-causal-8k/exactness", "workloads/deepseek-causal-8k/forward",
        "workloads/deepseek-causal-8k/backward", "workloads/latent-causal-4k/exactness",
        "workloads/latent-causal-4k/forward",
    ]  # fmt: skip


def test_what_is_wrong_is_not_timed(bench, monkeypatch):
    right = workload_ways.attention
    monkeypatch.setattr(workload_ways, "attention", lambda q, k, v, mask: 1.01 * right(q, k, v, mask))
    assert not workload(bench, BY_KIND["causal"], ("sdpa-fa2",), 0)
    exactness, *others = bench.measurements
    assert exactness.value > 1 and len(others) == 4
    assert all("an error of ours is" in each.failure for each in others)


def test_a_peer_that_computes_something_else_is_not_timed(bench, monkeypatch):
    monkeypatch.setattr(workload_ways, "scaled_dot_product_attention", lambda q, k, v, **_: v.clone())
    assert workload(bench, BY_KIND["dense"], ("sdpa-fa2",), 0)
    found = {each.name: each for each in bench.measurements if each.way == "sdpa-fa2"}
    assert found["workloads/bert-64x512/forward/sdpa-fa2"].failure.startswith("ValueError: differs from ours by ")


def test_flash_attention_4_gets_its_own_arguments_or_lists():
    package = flashattention4.Package(None, BlockSparseTensors, SimpleNamespace(jit=lambda function: function))

    def options(kind):
        w = BY_KIND[kind]
        return fa4_options(w, *KINDS[kind](w, CPU), package)

    assert options("dense") == {"causal": False} and options("causal") == {"causal": True}
    assert options("window") == {"window_size": (63, 0)}
    for kind in ("prefix", "longformer", "image"):
        given, (mask, _) = options(kind), KINDS[kind](BY_KIND[kind], CPU)
        rule = given["mask_mod"]
        lists = from_fa4(
            given["block_sparse_tensors"], 256, 256, mask_mod=lambda b, h, q, k, rule=rule: rule(b, h, q, k, None, None)
        )
        assert torch.equal(lists.to_dense(), mask.to_dense())
    with pytest.raises(Unavailable, match="its rules read no memory"):
        options("padded")


def test_a_cell_is_the_fastest_peer_over_ours():
    times = {"sparseflash": 2.0, "sparseflash-varlen": 1.0, "flex": 3.0, "fa4": 0.9}
    found = [Measurement(f"workloads/a/forward/{way}", ms, 0.0, "ms") for way, ms in times.items()]
    assert cells(found) == {"workloads/a/forward": (0.9, "fa4")}
    assert cells(found[:2]) == {}


def test_the_command_records_chosen_workloads_until_the_time_is_over(tmp_path):
    arguments = ["--workloads", "--device", "cpu", "--peers", "sdpa-fa2", "--out", str(tmp_path), "--cases", "cross-*"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    run_, found = read(tmp_path / "workloads.jsonl")
    assert {each.name.split("/")[1] for each in found} == {"cross-1k-64k", "cross-128-64k"}
    assert "workloads/cross-1k-64k/forward: " in done.output and run_.seed == 0
    done = CliRunner().invoke(app, [*arguments, "--minutes", "-1"])
    assert {each.failure for each in read(tmp_path / "workloads.jsonl")[1]} == {"not run: the limit was -1 minutes"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "nope"], "--cases must match at least one of llama-"),
        (["--peers", "fa5"], "--peers must be from flex"),
    ],
)
def test_what_cannot_be_measured_is_told(arguments, message):
    done = CliRunner().invoke(app, ["--workloads", "--device", "cpu", *arguments])
    assert done.exit_code == 2 and message in " ".join(done.output.replace("│", " ").split())
