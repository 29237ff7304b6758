"""The conclusions from the times of a run, on rows with known times."""

from dataclasses import replace

import pytest

from experiments.benchmarks.speed.cases import CALL, FIRST, FORWARD, MEMORY, Case
from experiments.benchmarks.speed.findings import findings
from experiments.benchmarks.speed.memory import MIB, floor_mib
from experiments.benchmarks.speed.rows import FAILED, OK, OURS, SKIPPED, Row

DENSE = Case("d64-dense", "dense", 1, 8, 1024, 64)
SPARSE = replace(DENSE, name="d64-butterfly", kind="butterfly")


def row(case: Case, direction: str = FORWARD, peer: str = OURS, **values: object) -> Row:
    return Row(case, peer, direction, OK, **values)  # type: ignore[arg-type]


def said(*rows: Row) -> list[str]:
    return findings([each.measurement for each in rows])


def test_a_row_is_a_measurement_with_its_unit() -> None:
    made = row(SPARSE, ms=0.5, spread=0.01, density=0.25, flops=1e9, error=0.3, checked="in full").measurement
    assert (made.name, made.value, made.spread, made.unit) == (f"speed/butterfly/64/forward/{OURS}", 0.5, 0.01, "ms")
    assert made.settings == SPARSE.settings | {"live": 0.25, "flops": 1e9, "error": 0.3, "checked": "in full"}
    call = row(replace(DENSE, name="call-dense", group="calls"), CALL, ms=0.02).measurement
    assert (call.name, call.value, call.unit) == (f"speed/call-dense/64/call/{OURS}", 20.0, "us")
    first = row(replace(DENSE, name="first-d64", group="calls"), FIRST[1], ms=2500.0, first_call_s=2.5).measurement
    assert (first.name, first.value, first.unit) == (f"speed/first-d64/64/first-backward/{OURS}", 2.5, "s")
    memory = row(replace(DENSE, name="memory-1k-dense", group="memory"), MEMORY, memory_mib=7.0).measurement
    assert (memory.value, memory.unit) == (7.0, "MiB")
    blocks = replace(SPARSE, name="block32-d64-butterfly", group="blocks", block=32)
    assert row(blocks, ms=1.0).measurement.name == f"speed/blocks-of-32/butterfly/64/forward/{OURS}"


@pytest.mark.parametrize(
    ("status", "why", "failure"),
    [(SKIPPED, "no windows", "skipped: no windows"), (FAILED, "", "FAILED")],
)
def test_a_row_without_a_time_says_why(status: str, why: str, failure: str) -> None:
    made = Row(DENSE, "fa4", FORWARD, status, reason=why).measurement
    assert made.value is None and made.failure == failure


def test_efficiency_is_time_over_density_times_dense_time() -> None:
    found = said(
        row(DENSE, ms=4.0, density=1.0),
        row(SPARSE, ms=1.5, density=0.25),
        row(SPARSE, ms=1.0, density=0.25, peer="flex"),
        row(replace(SPARSE, length=2048, name="n2k-butterfly", group="lengths"), ms=9.0, density=0.25),  # no dense one
    )
    assert found == [f"speed/butterfly/64/forward/{OURS}: 1.50 of live x dense"]


def test_small_blocks_are_compared_by_live_score_with_blocks_of_128() -> None:
    of = {
        block: replace(SPARSE, name=f"block{block}-d64-butterfly", group="blocks", block=block)
        for block in (128, 64, 32)
    }
    found = said(
        row(of[128], ms=2.0, flops=100.0), row(of[64], ms=1.0, flops=45.0), row(of[32], ms=1.0, flops=25.0)
    )  # fmt: skip
    assert found == [
        f"speed/blocks-of-64/butterfly/64/forward/{OURS}: 0.90 of the speed per live score of blocks of 128, wanted "
        "0.85: met",
        f"speed/blocks-of-32/butterfly/64/forward/{OURS}: 0.50 of the speed per live score of blocks of 128, wanted "
        "0.60: missed",
    ]


def test_first_calls_have_a_target() -> None:
    case = replace(SPARSE, name="first-d64", group="calls")
    found = said(row(case, FIRST[0], ms=2900.0), row(case, FIRST[1], ms=3100.0), row(case, FIRST[1], "flex", ms=9e3))
    assert [line.rpartition(": ")[2] for line in found] == ["met", "missed"]


@pytest.mark.parametrize(("longer", "verdict"), [(42.0, "linear"), (60.0, "not linear")])
def test_memory_is_compared_with_the_tensors_and_over_lengths(longer: float, verdict: str) -> None:
    cases = [replace(SPARSE, name=f"memory-{n}", group="memory", length=n) for n in (2048, 1024)]
    (found,) = said(row(cases[0], MEMORY, memory_mib=longer), row(cases[1], MEMORY, memory_mib=20.0))
    floor = floor_mib(1, 8, 8, 2048, 64, "bfloat16")
    assert floor == 8 * 8 * 2048 * 64 * 2 / MIB
    assert f"{longer / floor:.2f} times q, k, v, output and gradients; {verdict} (x{longer / 40:.2f} a token" in found
    assert found.startswith("speed/memory-2048/64/memory/")
