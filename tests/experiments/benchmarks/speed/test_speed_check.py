from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from experiments.benchmarks.harness import SAME_FUNCTION, Bench, Unavailable
from experiments.benchmarks.speed import peers as known
from experiments.benchmarks.speed import run
from experiments.benchmarks.speed.cases import BACKWARD, CASES, FORWARD, MEMORY, WAYS, Case
from experiments.benchmarks.speed.patterns import PLAIN_KINDS, Pattern
from experiments.benchmarks.speed.peers import PEERS, ours
from experiments.benchmarks.speed.peers.runner import Inputs, Runner
from experiments.benchmarks.speed.run import MIB, OURS, peak_mib, run_case
from experiments.measurements import Measurement, Run
from tests.processes.threads import threads

CPU = torch.device("cpu")
CASE = Case("small", "butterfly", 1, 3, 128, 16, dtype=torch.float32, block=16)
Made = Callable[[Case, Pattern, Inputs], Runner]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Measurement]]:
    def measure(case: Case, mine: Made = ours, *, right: bool = True, **peers: Made) -> dict[str, Measurement]:
        monkeypatch.setattr(known, "ours", mine)
        for name, peer in peers.items():
            monkeypatch.setitem(PEERS, name, peer)
        bench = Bench("speed", Run("CPU", "", {}, "", "", ""), tmp_path, CPU, rounds=1)
        assert run_case(bench, case, list(peers), 0, 2) == right
        return {each.name.removeprefix(f"speed/{case.path}/"): each for each in bench.measurements}

    return measure


def changed(change: Callable[[Tensor], Tensor], case: Case, live: Pattern, inputs: Inputs) -> Runner:
    right = ours(case, live, inputs)
    return replace(right, call=lambda q, k, v: change(right.call(q, k, v)))


def with_gradient(change: Callable[[Tensor], Tensor], case: Case, live: Pattern, inputs: Inputs) -> Runner:
    right = ours(case, live, inputs)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        v = v.view_as(v)
        if v.requires_grad:
            v.register_hook(change)
        return right.call(q, k, v)

    return replace(right, call=call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_ours_is_right_and_timed(kind: str, dtype: torch.dtype, measured) -> None:  # type: ignore[no-untyped-def]
    found = measured(replace(CASE, kind=kind, dtype=dtype))
    assert list(found) == [f"exactness/{OURS}", *(f"{way}/{OURS}" for way in WAYS)]
    assert 0 <= found[f"exactness/{OURS}"].value <= 1
    assert all(found[f"{way}/{OURS}"].value > 0 and found[f"{way}/{OURS}"].settings["flops"] > 0 for way in WAYS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "change",
    [
        lambda out: out * 1.05,
        lambda out: out.roll(1, dims=2),
        lambda out: torch.cat([out[:, :, :-1], torch.zeros_like(out[:, :, -1:])], 2),
        lambda out: torch.cat([out[:, :, :-1], torch.full_like(out[:, :, -1:], float("nan"))], 2),
    ],
    ids=["scaled", "shifted", "one row missing", "one row NaN"],
)
def test_a_wrong_output_is_recorded_and_nothing_is_timed(change, dtype, measured) -> None:  # type: ignore[no-untyped-def]
    found = measured(replace(CASE, dtype=dtype), partial(changed, change), right=False, same=ours)
    exactness = found.pop(f"exactness/{OURS}")
    assert exactness.value is None or exactness.value > 1
    assert len(found) == 2 * len(WAYS) and all(each.value is None and each.failure for each in found.values())


@pytest.mark.parametrize("change", [lambda grad: grad * 1.05, lambda grad: grad * float("nan")], ids=["scaled", "NaN"])
def test_so_is_a_wrong_gradient(change, measured) -> None:  # type: ignore[no-untyped-def]
    found = measured(CASE, partial(with_gradient, change), right=False)
    assert all(each.value is None for name, each in found.items() if "exactness" not in name)
    assert measured(replace(CASE, passes=(FORWARD,)), partial(with_gradient, change))[f"forward/{OURS}"].value > 0


def test_a_peer_may_fail_be_absent_or_differ_and_the_others_go_on(measured) -> None:  # type: ignore[no-untyped-def]
    def failing(case: Case, live: Pattern, inputs: Inputs) -> Runner:
        raise RuntimeError("\nno kernel in /some/folder/file.py and/or\nand more")

    def absent(case: Case, live: Pattern, inputs: Inputs) -> Runner:
        raise Unavailable("not installed")

    other = partial(changed, lambda out: out * 1.2)
    half = partial(with_gradient, lambda grad: grad / 2)
    found = measured(CASE, failing=failing, absent=absent, other=other, half=half, same=ours)
    for way in WAYS:
        assert found[f"{way}/failing"].failure == "RuntimeError: no kernel in file.py and/or"
        assert found[f"{way}/absent"].failure == "skipped: not installed"
        assert found[f"{way}/other"].failure.startswith("ValueError: differs from ours by")
        assert found[f"{way}/same"].value > 0 and found[f"{way}/{OURS}"].value > 0
    assert found["forward/half"].value > 0 and "differs from ours" in found["backward/half"].failure


def test_a_peer_that_fails_while_timed_is_reported(measured) -> None:  # type: ignore[no-untyped-def]
    def tiring(case: Case, live: Pattern, inputs: Inputs) -> Runner:
        right, calls = ours(case, live, inputs), iter(range(2))

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            next(calls)
            return right.call(q, k, v)

        return replace(right, call=call)

    found = measured(replace(CASE, passes=(FORWARD, BACKWARD)), tiring=tiring, same=ours)
    assert found["backward/tiring"].failure and found["forward/same"].value > 0


def test_a_peer_may_have_its_own_order_of_dimensions(measured) -> None:  # type: ignore[no-untyped-def]
    def turned(case: Case, live: Pattern, inputs: Inputs) -> Runner:
        right = ours(case, live, inputs)
        q, k, v = (t.detach().mT.contiguous().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return right.call(*(tensor.mT.contiguous() for tensor in (q, k, v))).mT

        return Runner(call, Inputs(q, k, v, inputs.dout.mT.contiguous()), to_bhnd=lambda tensor: tensor.mT)

    found = measured(CASE, turned=turned)
    assert all(found[f"{way}/turned"].value > 0 for way in WAYS)


@pytest.mark.parametrize("row", [0, 1024])
def test_what_is_wrong_in_a_part_of_a_long_head_is_found(row, monkeypatch, measured) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(run, "LIVE_SCORES_IN_FULL", 0)
    case = replace(CASE, length=2048, kind="local", passes=(FORWARD,))
    value = 0.0 if row == 0 else float("nan")  # only the first block is surely compared

    def broken(out: Tensor) -> Tensor:
        return out.index_fill(2, torch.tensor([row]), value)

    assert measured(case, partial(changed, broken), right=False)[f"forward/{OURS}"].failure
    assert measured(case)[f"forward/{OURS}"].value > 0


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_are_right_and_their_key_gradients_are_sums(kv_heads, measured) -> None:  # type: ignore[no-untyped-def]
    case = replace(CASE, heads=4, kv_heads=kv_heads, kind="causal")
    assert measured(case, same=ours)["both/same"].value > 0
    measured(case, partial(with_gradient, lambda grad: grad * 1.05), right=False)


def test_memory_is_not_counted_on_a_cpu_and_says_so(measured) -> None:  # type: ignore[no-untyped-def]
    found = measured(replace(CASE, passes=(MEMORY,)), same=ours)
    assert found[f"memory/{OURS}"].failure == "skipped: PyTorch counts memory on a CUDA device only"


def test_every_case_of_the_benchmark_has_a_tolerance_for_its_peers() -> None:
    assert {case.dtype for case in CASES} <= set(SAME_FUNCTION)


@pytest.mark.parametrize("own_order", [False, True])
def test_peak_memory_counts_the_inputs_once(own_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the allocator: 4 inputs of 1 MiB, copied by a peer with an order of its own; a step takes 7
    MiB more."""
    inputs = Inputs(*(torch.zeros(2**18) for _ in range(4)))
    mine = Inputs(*(tensor.clone() for tensor in inputs.tensors)) if own_order else inputs
    steps: list[str] = []
    runner = Runner(lambda q, k, v: q, mine)
    monkeypatch.setattr(Runner, "step", lambda self: steps.append("step"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: steps.append("reset"))
    peak = (4 + (4 if own_order else 0) + 7) * MIB
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak)
    found = peak_mib(runner, inputs, 4 * MIB, torch.device("cuda"))
    assert found == 4 + 7 and steps == ["step", "reset", "step"]
