from unittest import mock

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from experiments.benchmarks import calls as benchmark
from experiments.benchmarks.calls import (
    CHOICE,
    FIRST_CALLS,
    FLEX,
    IMPLEMENTATIONS_OF,
    OURS,
    SDPA,
    WAYS,
    Shape,
    calls_of,
)
from experiments.benchmarks.harness import Bench
from experiments.measurements import Run, read

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
CPU = torch.device("cpu")
SHAPE = Shape(batch=2, heads=2, tokens=256, dim=16, block=64)
CLOSE = {"atol": 2e-2, "rtol": 2e-2}


def causal_attention(q, k, v, live=True):
    lower = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return scaled_dot_product_attention(q.float(), k.float(), v.float(), lower & live).to(q.dtype)


@pytest.fixture
def implementations():
    with mock.patch.object(torch, "compile", lambda function, **options: function):
        yield {name: implementation(SHAPE, CPU) for name, implementation in IMPLEMENTATIONS_OF.items()}


@pytest.mark.parametrize("name", IMPLEMENTATIONS_OF)
def test_every_implementation_computes_the_same_attention(implementations, name):
    torch.manual_seed(0)
    implementation = implementations[name]
    q, k, v = (SHAPE.tensor(CPU) for _ in range(3))
    torch.testing.assert_close(implementation.causal(q, k, v), causal_attention(q, k, v), **CLOSE)
    torch.testing.assert_close(implementation.newly_causal(q, k, v), causal_attention(q, k, v), **CLOSE)
    lengths = torch.tensor([100, 256], dtype=torch.int32)
    live = (torch.arange(SHAPE.tokens) < lengths[:, None])[:, None, None, :]
    got, want = implementation.with_lengths(q, k, v, lengths), causal_attention(q, k, v, live)
    for element, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(got[element, :, :length], want[element, :, :length], **CLOSE)


@pytest.mark.parametrize(("name", "block"), [(OURS, 64), (FLEX, 128)])
def test_chosen_blocks_are_a_rows_own_and_the_best_of_those_before_it(implementations, name, block):
    torch.manual_seed(0)
    q, k, v = (SHAPE.tensor(CPU) for _ in range(3))
    scores = SHAPE.scores(CPU)
    blocks = SHAPE.tokens // block
    live = torch.zeros(SHAPE.batch, SHAPE.heads, blocks, blocks, dtype=torch.bool)
    for element in range(SHAPE.batch):
        for head in range(SHAPE.heads):
            for row in range(blocks):
                best = scores[element, head, row, :row].sort(descending=True).indices[: SHAPE.chosen - 1]
                live[element, head, row, [row, *best.tolist()]] = True
    live = live.repeat_interleave(block, 2).repeat_interleave(block, 3)
    got = implementations[name].chosen(q, k, v, scores)
    torch.testing.assert_close(got, causal_attention(q, k, v, live), **CLOSE)


@pytest.mark.parametrize("name", [OURS, SDPA])
def test_every_way_of_calling_runs(implementations, name):
    calls = calls_of(implementations[name], SHAPE, CPU)
    assert set(WAYS) - calls.keys() == ({CHOICE} if name == SDPA else set())
    for call in calls.values():
        call()


def test_first_calls_are_those_of_a_process_of_their_own(tmp_path):
    bench = Bench("calls", Run("H200", "", {}, "", "", ""), tmp_path, CPU)
    with mock.patch.object(benchmark, "answer_of", return_value=dict.fromkeys(FIRST_CALLS, 0.5)) as run:
        benchmark.record_first_calls(bench, OURS)
    assert run.call_args.args == (benchmark.seconds_of, OURS)
    with mock.patch.object(benchmark, "answer_of", side_effect=RuntimeError("the process ended with 1")):
        benchmark.record_first_calls(bench, FLEX)
    found = read(tmp_path / "calls.jsonl")[1]
    assert [each.name for each in found] == [f"calls/{what}/{name}" for name in (OURS, FLEX) for what in FIRST_CALLS]
    assert [(each.value, each.unit, each.failure) for each in found] == [
        *[(0.5, "s", "")] * 3, *[(None, "s", "the process ended with 1")] * 3,
    ]  # fmt: skip
