from __future__ import annotations

from collections.abc import Sequence

from experiments.measurements import Measurement, Run, ratio

OURS = "sparseflash"
MOST_COLUMNS = 8
# Settings that are printed as rates: their unit, and how many are one.
_RATES = {"flops": ("TFLOP/s", 1e12), "bytes": ("GB/s", 1e9), "items": ("/s", 1.0)}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def about(run: Run) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    helped = "".join(f"; {each}" for each in run.helped)
    return f"{run.device}, driver {run.driver}, {versions}; {run.commit}, {run.date}{helped}; {run.command}"


def markdown(measurements: Sequence[Measurement], over: str = OURS) -> str:
    """A row for each case and pass, a column for each way; a row for each way if the ways are many.

    In brackets: rates, and the ratio to the value of the way `over` in the same row. For times, above 1 means that
    `over` is faster. A ratio that exceeds 1 by more than its noise is bold.
    """
    rows: dict[str, dict[str, Measurement]] = {}
    for each in measurements:
        rows.setdefault(each.name.rpartition("/")[0], {})[each.way] = each
    ways = list(dict.fromkeys(each.way for each in measurements))
    if len(ways) <= MOST_COLUMNS:
        lines = [["", *ways]] + [[row, *(cell(found, way, over) for way in ways)] for row, found in rows.items()]
    else:
        lines = [["", "way", ""]] + [[row, way, cell(found, way, over)] for row, found in rows.items() for way in found]
    rule = ["---", *("---:" for _ in lines[0][1:])]
    text = "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))
    return "\n".join([text, *failures(measurements)])


def cell(row: dict[str, Measurement], way: str, over: str) -> str:
    found = row.get(way)
    if found is None:
        return "-"
    if found.value is None:
        return found.failure.split(":")[0] if found.failure.startswith(("skipped", "not run")) else "failed"
    parts = []
    for name, (unit, amount) in _RATES.items():
        if name in found.settings and found.unit in _SECONDS:
            parts.append(f"{found.settings[name] / (found.value * _SECONDS[found.unit]) / amount:,.4g} {unit}")
    ours = row.get(over)
    if ours is not None and ours is not found and ours.value and ours.unit == found.unit:
        times = ratio((found, ours), found.name, ours.name)
        text = f"x{times.value:.2f}"
        parts.append(f"**{text}**" if times.above_noise else text)
    brackets = f" ({', '.join(parts)})" if parts else ""
    return f"{found.value:.4g}{f' {found.unit}' if found.unit != '1' else ''}{brackets}"


def failures(measurements: Sequence[Measurement]) -> list[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in measurements:
        if each.failure:
            reasons.setdefault((each.way, each.failure), []).append(each.name.rpartition("/")[0])
    lines = []
    for (way, why), cases in reasons.items():
        named = ", ".join(cases) if len(cases) <= 4 else f"{len(cases)} rows from {cases[0]} to {cases[-1]}"
        lines.append(f"- {way} ({named}): {why}")
    return ["", *lines] if lines else []
