"""Measured numbers that stand in a page or docstring by hand: outside of marks, beside a unit that only measurements
have."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from docs.figures.marks import pieces_of
from docs.figures.store import ROOT

_NUMBER = r"(?<![\w.=])\d[\d,]*(?:\.\d+)?"
_UNITS = (
    "TFLOP/s", "GFLOP/s", "[KMGT]i?B/s", "tokens/s", "steps/s", "images/s", "tokens a second", "us", "µs", "ms",
    "microseconds?", "milliseconds?", "times as (?:fast|long|slow)", "times (?:faster|slower)", "% MFU",
    "% (?:faster|slower|longer)", r"± [\d.]+ %",
)  # fmt: skip
MEASURED = re.compile(rf"{_NUMBER}\*{{0,2}}\s(?:{'|'.join(_UNITS)})(?!\w)".replace(" ", r"\s"))
# A ratio in a cell of a table: nothing but a number with two places, or a range of them.
CELL = re.compile(r"(?<=\|)\s*\*{0,2}\d+\.\d\d(?:\*{0,2}(?: to |, )\*{0,2}\d+\.\d\d)*\*{0,2}\s*(?=\|)")
# Sentences, or parts of one, whose number is not measured: a published figure, a definition, a choice.
ALLOWED: dict[str, tuple[str, ...]] = {
    "experiments/lm/README.md": ("the peak is 989 TFLOP/s for H100 and H200.",),
    "docs/pages/selection.md": ("close to 600 TFLOP/s forward on an H800", "about 115 TFLOP/s backward on an H200"),
}


def handwritten(path: Path, allowed: tuple[str, ...] | None = None) -> list[str]:
    """The measured numbers that a page has by hand, each with its line."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    for sentence in ALLOWED.get(name, ()) if allowed is None else allowed:
        if sentence not in " ".join(text.split()):
            raise ValueError(f"{sentence!r} must stand in {name}, where its number is allowed: remove it from ALLOWED")
        text = re.sub(r"\s+".join(map(re.escape, sentence.split())), _blank, text)
    text = "".join(piece if kind == "text" else re.sub(r"[^\n]", " ", piece) for kind, piece in pieces_of(text))
    found = [(each.start(), each[0]) for rule in (MEASURED, CELL) for each in rule.finditer(text)]
    return [f"{name}:{text.count(chr(10), 0, at) + 1}: {' '.join(number.split())}" for at, number in sorted(found)]


def in_docstrings(path: Path) -> list[str]:
    """The measured numbers in the docstrings of a module, without a ratio that has no unit, each with its line."""
    name, found = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name, []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            words = re.sub(r"\n +", "\n", ast.get_docstring(node, clean=False) or "")
            for each in MEASURED.finditer(words):
                line = node.body[0].lineno + words.count("\n", 0, each.start())
                found.append(f"{name}:{line}: {' '.join(each[0].split())}")
    return found


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found[0])
