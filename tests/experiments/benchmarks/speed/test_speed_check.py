"""The benchmark's exactness check: its truth is right, and wrong results are not timed."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from experiments.benchmarks.harness import SAME_FUNCTION, Unavailable
from experiments.benchmarks.speed import check, memory
from experiments.benchmarks.speed.cases import BACKWARD, BOTH, CALL, CASES, FORWARD, MEMORY, WAYS, Case
from experiments.benchmarks.speed.inputs import Options, make_inputs
from experiments.benchmarks.speed.patterns import KINDS, Pattern, pattern
from experiments.benchmarks.speed.peers import ours
from experiments.benchmarks.speed.peers.runner import Inputs, Runner
from experiments.benchmarks.speed.rows import DIFFERS, FAILED, OK, OURS, SKIPPED, WRONG, Row
from experiments.benchmarks.speed.run import run_case
from tests.processes.threads import threads

CASE = Case("small", "butterfly", 1, 3, 128, 16, dtype=torch.float32, block=16)
OPTIONS = Options(torch.device("cpu"), rounds=1, round_ms=0.0, calls=2, heads=2)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny operations on a shared machine: threads only wait for one another."""
    with threads(1):
        yield


def changed(change: Callable[[Tensor], Tensor]) -> Callable[[Case, Pattern, Inputs], Runner]:
    """Ours with its output changed."""

    def peer(case: Case, live: Pattern, inputs: Inputs) -> Runner:
        right = ours(case, live, inputs)
        return replace(right, call=lambda q, k, v: change(right.call(q, k, v)))

    return peer


def with_gradient(change: Callable[[Tensor], Tensor]) -> Callable[[Case, Pattern, Inputs], Runner]:
    """Ours with the right output and the gradient of v changed."""

    def peer(case: Case, live: Pattern, inputs: Inputs) -> Runner:
        right = ours(case, live, inputs)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            v = v.view_as(v)
            if v.requires_grad:
                v.register_hook(change)
            return right.call(q, k, v)

        return replace(right, call=call)

    return peer


def statuses(rows: list[Row]) -> dict[tuple[str, str], str]:
    return {(row.peer, row.direction): row.status for row in rows}


@pytest.mark.parametrize("kind", KINDS)
def test_truth_is_dense_attention_and_its_gradients(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SCORES_AT_ONCE", 64 * 300)  # several sizes of chunk
    live = pattern(kind, 512, 32)
    idx = torch.arange(512)
    head = [torch.randn(512, 16, dtype=torch.float64) for _ in range(4)]
    q, k, v = (tensor.clone().requires_grad_() for tensor in head[:3])
    scores = (q @ k.mT / 4).masked_fill(~live.live(idx[:, None], idx[None, :]), float("-inf"))
    out = scores.softmax(-1) @ v
    gradients = torch.autograd.grad(out, (q, k, v), head[3])
    found = check.plain_attention(head, live, torch.float64)
    for name, expected in zip(check.NAMES, (out, *gradients)):
        torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_ours_is_right_and_timed(kind: str, dtype: torch.dtype) -> None:
    rows = run_case(replace(CASE, kind=kind, dtype=dtype), ours, {}, OPTIONS)
    assert statuses(rows) == {(OURS, way): OK for way in WAYS}
    assert all(row.ms is not None and row.error is not None and 0 <= row.error <= 1 for row in rows)
    assert {row.checked for row in rows} == {"2 of 3 heads in full"}


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
def test_a_wrong_output_is_marked_and_not_timed(change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    rows = run_case(replace(CASE, dtype=dtype), changed(change), {"same": ours}, OPTIONS)
    assert statuses(rows) == {(OURS, way): WRONG for way in WAYS}
    assert all(row.ms is None and "times the yardstick" in row.reason for row in rows)


@pytest.mark.parametrize("change", [lambda grad: grad * 1.05, lambda grad: grad * float("nan")], ids=["scaled", "NaN"])
def test_a_wrong_gradient_stops_what_has_a_backward_only(change: Callable[[Tensor], Tensor]) -> None:
    rows = run_case(CASE, with_gradient(change), {"same": ours}, OPTIONS)
    wrong = {(OURS, way): WRONG for way in (BACKWARD, BOTH)}
    assert statuses(rows) == {(OURS, FORWARD): OK, ("same", FORWARD): OK, **wrong}
    assert next(row for row in rows if row.direction == BACKWARD).reason.startswith("the error of dv is")


def test_a_wrong_call_is_marked() -> None:
    case = replace(CASE, passes=(CALL,))
    assert statuses(run_case(case, changed(lambda out: -out), {}, OPTIONS)) == {(OURS, CALL): WRONG}
    assert statuses(run_case(case, ours, {}, OPTIONS)) == {(OURS, CALL): OK}


def test_a_peer_may_fail_be_absent_or_differ_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    def failing(case: Case, live: Pattern, inputs: Inputs) -> Runner:
        raise RuntimeError("\nno kernel in /some/folder/file.py and/or\nand more")

    def absent(case: Case, live: Pattern, inputs: Inputs) -> Runner:
        raise Unavailable("not installed")

    peers = {
        "failing": failing,
        "absent": absent,
        "other": changed(lambda out: out * 1.2),
        "half": with_gradient(lambda grad: grad / 2),
        "same": ours,
    }
    rows = run_case(CASE, ours, peers, OPTIONS)
    found = statuses(rows)
    for way in WAYS:
        assert found["failing", way] == FAILED and found["absent", way] == SKIPPED
        assert found["other", way] == DIFFERS and found["same", way] == found[OURS, way] == OK
    assert found["half", FORWARD] == OK and found["half", BACKWARD] == found["half", BOTH] == DIFFERS
    assert {row.reason for row in rows if row.peer == "failing"} == {"RuntimeError: no kernel in file.py and/or"}
    assert all((row.ratio is not None) == (row.status == OK and row.peer != OURS) for row in rows)
    assert "and/or\nand more" in capsys.readouterr().err


def test_a_peer_that_fails_while_timed_is_reported() -> None:
    def tiring(case: Case, live: Pattern, inputs: Inputs) -> Runner:
        right, calls = ours(case, live, inputs), iter(range(2))

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            next(calls)
            return right.call(q, k, v)

        return replace(right, call=call)

    found = statuses(run_case(CASE, ours, {"tiring": tiring, "same": ours}, OPTIONS))
    assert found["tiring", FORWARD] == FAILED
    assert found["tiring", BACKWARD] == found["same", FORWARD] == found[OURS, BACKWARD] == OK


def test_a_peer_may_have_its_own_order_of_dimensions() -> None:
    def turned(case: Case, live: Pattern, inputs: Inputs) -> Runner:
        """Everything as [B, H, D, N]."""
        right = ours(case, live, inputs)
        q, k, v = (t.detach().mT.contiguous().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return right.call(*(tensor.mT.contiguous() for tensor in (q, k, v))).mT

        return Runner(call, Inputs(q, k, v, inputs.dout.mT.contiguous()), to_bhnd=lambda tensor: tensor.mT)

    rows = run_case(CASE, ours, {"turned": turned}, OPTIONS)
    assert all(row.status == OK for row in rows)
    assert all(row.difference is not None and row.difference < 1e-6 for row in rows if row.peer == "turned")


def test_a_mask_of_another_density_is_refused() -> None:
    live = pattern("butterfly", 128, 16)
    inputs = make_inputs(CASE, OPTIONS)
    with pytest.raises(ValueError, match="the mask must keep"):
        ours(CASE, replace(live, kept=live.kept - 1), inputs)


def test_checked_heads_are_first_last_and_drawn() -> None:
    assert check.checked_heads(2, 4, 2) == [(0, 0), (1, 3)]
    assert len(set(check.checked_heads(2, 4, 5))) == 5
    assert sorted(check.checked_heads(1, 3, 99)) == [(0, 0), (0, 1), (0, 2)]
    assert check.checked_heads(1, 1, 3) == [(0, 0)]


@pytest.mark.parametrize("kind", ["local", "butterfly", "window64"])
def test_a_part_of_a_head_is_computed_as_the_whole(kind: str) -> None:
    live = pattern(kind, 2048, 16)
    part = check.part(live, limit=0, blocks=4)
    assert not part.whole and part.rows[0] and part.rows[-1] and part.columns[0] and part.columns[-1]
    assert int(part.columns.sum()) >= 4
    head = [torch.randn(2048, 16, dtype=torch.float64) for _ in range(4)]
    whole, some = (check.plain_attention(head, live, torch.float64, rows) for rows in (None, part.rows))
    for name in check.NAMES:
        tokens = part.tokens(name)
        torch.testing.assert_close(some[name][tokens], whole[name][tokens], rtol=1e-12, atol=1e-12)


def test_a_part_names_its_blocks() -> None:
    live = pattern("local", 2048, 16)
    assert str(check.part(live)) == "in full"
    part = check.part(live, limit=0, blocks=3)
    rows, columns = int(part.rows.sum()), int(part.columns.sum())
    assert 3 <= columns < rows < 128
    assert str(part) == f"{rows} of 128 query blocks and {columns} of 128 key blocks"
    assert check.part(pattern("dense", 256, 16), limit=0).whole  # a key block of a dense mask sees every query


@pytest.mark.parametrize("row", [0, 1024])
def test_what_is_wrong_in_a_part_of_a_long_head_is_found(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.part, "__kwdefaults__", {"limit": 0, "blocks": 4, "seed": 0})
    case = replace(CASE, length=2048, kind="local", passes=(FORWARD,))
    value = 0.0 if row == 0 else float("nan")  # the first block is always compared; elsewhere NaN shows without that

    def broken(out: Tensor) -> Tensor:
        return out.index_fill(2, torch.tensor([row]), value)

    assert statuses(run_case(case, changed(broken), {}, OPTIONS)) == {(OURS, FORWARD): WRONG}
    right = run_case(case, ours, {}, OPTIONS)
    assert statuses(right) == {(OURS, FORWARD): OK} and "query blocks" in right[0].checked


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_are_right_and_their_key_gradients_are_sums(kv_heads: int) -> None:
    case = replace(CASE, heads=4, kv_heads=kv_heads, kind="causal")
    rows = run_case(case, ours, {"same": ours}, OPTIONS)
    assert all(row.status == OK for row in rows)
    assert rows[0].checked == f"{min(kv_heads, 2)} of {kv_heads} heads in full"
    wrong = run_case(case, with_gradient(lambda grad: grad * 1.05), {}, OPTIONS)
    assert statuses(wrong)[OURS, BACKWARD] == WRONG


def test_memory_is_not_counted_on_a_cpu_and_says_so() -> None:
    (row,) = run_case(replace(CASE, passes=(MEMORY,)), ours, {"same": ours}, OPTIONS)
    assert row.status == SKIPPED and row.reason == "PyTorch counts memory on a CUDA device only"


def test_every_case_of_the_benchmark_has_a_tolerance_for_its_peers() -> None:
    assert {case.dtype for case in CASES} <= set(SAME_FUNCTION)


@pytest.mark.parametrize("own_order", [False, True])
def test_peak_memory_counts_the_inputs_once(own_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the allocator: 4 inputs of 1 MiB were there before, a peer with an order of its own copies
    them, and a step takes 7 MiB more."""
    inputs = Inputs(*(torch.zeros(2**18) for _ in range(4)))
    mine = Inputs(*(tensor.clone() for tensor in inputs.tensors)) if own_order else inputs
    steps: list[str] = []
    runner = Runner(lambda q, k, v: q, mine)
    monkeypatch.setattr(Runner, "step", lambda self: steps.append("step"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: steps.append("reset"))
    peak = (4 + (4 if own_order else 0) + 7) * memory.MIB
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak)
    found = memory.peak_mib(runner, inputs, 4 * memory.MIB, torch.device("cuda"))
    assert found == 4 + 7 and steps == ["step", "reset", "step"]
