"""The stored runs, `experiments/results/BENCHMARK/FILE.jsonl`, and the requests that a page may make."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from experiments.measurements import Measurement, Ratio, Run, ratio, read

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"
DIGITS = 3  # significant ones of a value
TEN, THOUSAND = 10, 1000
# What a time can be shown as: the setting that says how much was done, and how much of it a millisecond is one.
RATES = {
    "TFLOP/s": ("flops", 1e9),
    "GB/s": ("bytes", 1e6),
    "tokens/s": ("items", 1e-3),
    "images/s": ("items", 1e-3),
}
SEEDS = "±"  # between a mean over seeds and its deviation, and between a ratio and its noise
SMALL = 0.01  # a noise that is not printed: the last place of a ratio
WITH_NOISE = " with noise"
DEFAULT = "h200"  # the file that a name without `@ FILE` is from, where several have it


class FigureError(ValueError):
    """A figure that the store cannot give, or a mark that cannot be read."""


@dataclass(frozen=True)
class Stored:
    """One file of the store: `key` is BENCHMARK/FILE."""

    key: str
    path: Path
    run: Run
    measurements: tuple[Measurement, ...]

    def matching(self, pattern: str) -> dict[str, tuple[Measurement, tuple[str, ...]]]:
        compiled = _expression(pattern)
        found = ((each, compiled.fullmatch(each.name)) for each in self.measurements if each.value is not None)
        return {each.name: (each, match.groups()) for each, match in found if match}


@cache
def stored(results: Path = RESULTS) -> dict[str, Stored]:
    """All files of the store that hold a run, by BENCHMARK/FILE."""
    files = {}
    for path in sorted(results.rglob("*.jsonl")):
        if path.read_text(encoding="utf-8").startswith('{"run":'):
            key = path.relative_to(results).with_suffix("").as_posix()
            files[key] = Stored(key, path, *_read(path))
    return files


def _read(path: Path) -> tuple[Run, tuple[Measurement, ...]]:
    run, measurements = read(path)
    return run, tuple(measurements)


@dataclass(frozen=True)
class Figure:
    """A figure as a page shows it, and the file it is from."""

    text: str
    file: Stored
    spread: float  # relative, the largest of its measurements
    unit: str = ""
    noise: str = ""  # of one ratio, to be shown after it; empty up to 0.01


def figure(request: str, results: Path = RESULTS) -> Figure:
    """What a page shows for a request (see `docs.figures`)."""
    if request.endswith(WITH_NOISE):
        found = figure(request.removesuffix(WITH_NOISE), results)
        return replace(found, text=found.text + found.noise)
    names, _, which = (part.strip() for part in request.partition(" @ "))
    names, _, rate = (part.strip() for part in names.partition(" in "))
    first, _, second = (part.strip() for part in names.partition(" / "))
    file = _file_with(first.partition(" + ")[0], which, results)
    if " + " in names:
        sums = [_sum(file, each) for each in (first, second)]
        return _ratios([ratio(sums, *(each.name for each in sums))], file)
    matching = file.matching(first)
    if not second:
        return _value(request, file, [_rated(each, rate) for each, _ in matching.values()])
    ratios = []
    for name, (_, stands) in matching.items():
        other = _filled(second, stands)
        if other in file.matching(other):
            ratios.append(ratio(file.measurements, name, other))
    if not ratios or (len(ratios) < len(matching) and not _is_pattern(first)):
        raise FigureError(f"{second} must be a measured name of {file.key}, which has {first}")
    return _ratios(ratios, file)


def _sum(file: Stored, names: str) -> Measurement:
    parts = []
    for name in names.split(" + "):
        if name not in file.matching(name):
            raise FigureError(f"{name} must be a measured name of {file.key}, to be added")
        parts.append(file.matching(name)[name][0])
    if len({each.unit for each in parts}) > 1:
        raise FigureError(f"{names} must have one unit; got {', '.join(sorted({each.unit for each in parts}))}")
    value = sum(each.value or 0.0 for each in parts)
    is_known = all(each.spread is not None for each in parts)
    spread = sum((each.value or 0.0) * (each.spread or 0.0) for each in parts) / value if is_known else None
    return replace(parts[0], name=names, value=value, spread=spread, settings={})


def noise(each: Ratio) -> float | None:
    """The noise of a ratio, rounded up to two places."""
    return None if each.noise is None else math.ceil(round(100 * each.noise, 6)) / 100


def verdict(each: Ratio) -> str:
    """The one rule by which pages say which library is faster, from the ratio and the noise as printed.

    "faster" (bold) if the ratio minus its noise is above 1, "slower" if their sum is below 1, else "as fast".

    >>> [verdict(Ratio(value, spread)) for value, spread in ((1.034, 0.01), (1.014, 0.006), (0.96, 0.01), (1.5, None))]
    ['faster', 'as fast', 'slower', 'as fast']
    """
    around = noise(each)
    if around is None:
        return "as fast"
    value = round(each.value, 2)
    return "faster" if round(value - around, 2) > 1 else "slower" if round(value + around, 2) < 1 else "as fast"


def _ratios(ratios: list[Ratio], file: Stored) -> Figure:
    ratios.sort(key=lambda each: each.value)
    ends = (f"{each.value:.2f}" if each.value < TEN else number(each.value) for each in (ratios[0], ratios[-1]))
    text = " to ".join(dict.fromkeys(ends))
    shown = ""
    if len(ratios) == 1:
        around = noise(ratios[0])
        shown = f" {SEEDS} ?" if around is None else f" {SEEDS} {around:.2f}" if around > SMALL else ""
    text = f"**{text}**" if all(verdict(each) == "faster" for each in ratios) else text
    return Figure(text, file, max(each.spread or 0.0 for each in ratios), noise=shown)


def _file_with(name: str, which: str, results: Path) -> Stored:
    benchmark = name.partition("/")[0]
    files = [each for key, each in stored(results).items() if key.partition("/")[0] == benchmark]
    having = [each for each in files if each.matching(name)]
    if which:
        having = [each for each in having if each.key == f"{benchmark}/{which}"]
    if not having:
        raise FigureError(f"{name} must be a measured name of the store{f', in {which}' if which else ''}; it is not")
    if len(having) > 1:
        having = [each for each in having if each.key == f"{benchmark}/{DEFAULT}"] or having
    if len(having) > 1:
        places = ", ".join(each.key.partition("/")[2] for each in having)
        raise FigureError(f"{name} must say of which run, as '@ FILE'; it is in {places}")
    return having[0]


def _rated(each: Measurement, rate: str) -> Measurement:
    if not rate:
        return each
    setting, scale = RATES.get(rate, ("", 1.0))
    if each.unit != "ms" or not each.value or setting not in each.settings:
        raise FigureError(
            f"{each.name} must be a time with the work done, to be shown in {rate}; {', '.join(RATES)} can be"
        )
    return replace(each, value=each.settings[setting] / each.value / scale, unit=rate)


def _value(request: str, file: Stored, found: list[Measurement]) -> Figure:
    if len({each.unit for each in found}) > 1:
        raise FigureError(f"{request} must have one unit; got {', '.join(sorted({each.unit for each in found}))}")
    found = sorted(found, key=lambda each: each.value or 0.0)
    unit = f" {found[0].unit}" if found[0].unit else ""
    spread = max(each.spread or 0.0 for each in found)
    if len(found) == 1 and found[0].spread_of == "seeds":
        (only,) = found
        deviation = abs(only.value or 0.0) * (only.spread or 0.0)
        places = max(1, _zeros(deviation, 1)) if deviation else 1
        return Figure(f"{only.value:.{places}f} {SEEDS} {deviation:.{places}f}{unit}", file, spread, unit)
    ends = dict.fromkeys(number(each.value or 0.0) for each in (found[0], found[-1]))
    return Figure(" to ".join(ends) + unit, file, spread, unit)


def number(value: float) -> str:
    """A number with three significant digits, and all the digits before the point.

    >>> number(0.3124), number(12.0), number(4659.2), number(0.0)
    ('0.312', '12.0', '4,659', '0')
    """
    if value == 0:
        return "0"
    if abs(value) >= THOUSAND:
        return f"{value:,.0f}"
    digits = DIGITS - len(str(int(abs(value)))) if abs(value) >= 1 else DIGITS - 1 + _zeros(value)
    return f"{value:.{digits}f}"


def _zeros(value: float, digits: int = DIGITS) -> int:
    return -int(f"{value:.{digits - 1}e}".rpartition("e")[2])


def _is_pattern(name: str) -> bool:
    return bool(re.search(r"[*{]", name))


_WILD = re.compile(r"\*|\{[^}]*\}")


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    text, at = "", 0
    for wild in _WILD.finditer(pattern):
        text += re.escape(pattern[at : wild.start()])
        choices = "|".join(map(re.escape, wild[0][1:-1].split(",")))
        text += "([^/]+)" if wild[0] == "*" else f"({choices})"
        at = wild.end()
    return re.compile(text + re.escape(pattern[at:]))


def _filled(pattern: str, stands: tuple[str, ...]) -> str:
    given = iter(stands)
    try:
        return _WILD.sub(lambda _: next(given), pattern)
    except StopIteration:
        raise FigureError(f"{pattern} must have no more wildcards than the name before it") from None
