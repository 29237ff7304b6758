"""Conclusions from the times of a run: efficiency relative to the ideal, the cost of small blocks, memory per token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.benchmarks.speed.memory import floor_mib
from experiments.benchmarks.speed.rows import OURS
from experiments.measurements import Measurement, ratio

# The least speed per live score, relative to blocks of 128.
BLOCK_TARGETS = {64: 0.85, 32: 0.6, 16: 0.4}
FIRST_CALL_TARGET_S = 3.0
# Memory counts as linear if, per token, it grows by at most this factor from the shortest length to the longest.
LINEAR = 1.1
_SHAPE = ("batch", "heads", "kv_heads", "tokens", "head_dim", "dtype")


def findings(measurements: Sequence[Measurement]) -> list[str]:
    """One line for each conclusion from one run."""
    timed = [each for each in measurements if each.value is not None]
    return [*_efficiency(timed), *_blocks(timed), *_first_calls(timed), *_memory(timed)]


def _without(each: Measurement, *names: str) -> tuple[object, ...]:
    """The key of measurements that differ only in these settings."""
    shared = [each.settings[name] for name in ("mask", "block", *_SHAPE) if name not in names]
    return (each.name.split("/")[-2], each.way, *shared)


def _efficiency(timed: Sequence[Measurement]) -> Iterator[str]:
    """time(mask) / (live x time(dense)), 1 is ideal, of sparse masks beside dense attention of the same shape."""
    dense = {_without(each, "mask"): each for each in timed if each.settings["mask"] == "dense" and each.unit == "ms"}
    for each in timed:
        whole = dense.get(_without(each, "mask"))
        if (
            each.way == OURS
            and each.unit == "ms"
            and whole is not None
            and each.settings["mask"] not in ("dense", "causal")
        ):
            found = ratio((each, whole), each.name, whole.name).value / each.settings["live"]
            yield f"{each.name}: {found:.2f} of live x dense"


def _blocks(timed: Sequence[Measurement]) -> Iterator[str]:
    """The speed per live score with small mask blocks, over that with blocks of 128."""
    large = {_without(each, "block"): each for each in timed if "/blocks-of-128/" in each.name}
    for each in timed:
        whole = large.get(_without(each, "block"))
        if "/blocks-of-" in each.name and whole is not None and each is not whole:
            slower = ratio((each, whole), each.name, whole.name).value
            speed = each.settings["flops"] / whole.settings["flops"] / slower
            target = BLOCK_TARGETS[each.settings["block"]]
            verdict = "met" if speed >= target else "missed"
            of_128 = f"{speed:.2f} of the speed per live score of blocks of 128"
            yield f"{each.name}: {of_128}, wanted {target:.2f}: {verdict}"


def _first_calls(timed: Sequence[Measurement]) -> Iterator[str]:
    for each in timed:
        if each.unit == "s" and each.way == OURS and each.value is not None:
            verdict = "met" if each.value <= FIRST_CALL_TARGET_S else "missed"
            yield f"{each.name}: {each.value:.2f} s, wanted {FIRST_CALL_TARGET_S:g}: {verdict}"


def _memory(timed: Sequence[Measurement]) -> Iterator[str]:
    """Over what q, k, v, the output and their gradients take, and per token over the shortest length."""
    series: dict[tuple[object, ...], list[Measurement]] = {}
    for each in timed:
        if each.unit == "MiB":
            series.setdefault(_without(each, "tokens"), []).append(each)
    for some in series.values():
        lengths = sorted(some, key=lambda one: one.settings["tokens"])
        token = [one.value / one.settings["tokens"] for one in lengths if one.value is not None]
        floors = [one.value / floor_mib(*(one.settings[name] for name in _SHAPE)) for one in lengths if one.value]
        growth = token[-1] / token[0]
        verdict = "linear" if growth <= LINEAR else "not linear"
        yield (
            f"{lengths[-1].name}: {floors[-1]:.2f} times q, k, v, output and gradients; {verdict} (x{growth:.2f} "
            f"a token from {lengths[0].settings['tokens']:,} tokens to {lengths[-1].settings['tokens']:,})"
        )
