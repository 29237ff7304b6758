"""The patterns that the gallery draws and the table measures, with one entry each.

`test_patterns_catalogue.py` compares each `live` with its builder, and fails if a public function of
`sparseflash.masks` has no entry in `entries/`.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.benchmarks.harness import chosen
from experiments.benchmarks.patterns.entries import butterflies, choices, factorized, graphs, grids, sequences
from experiments.benchmarks.patterns.entries.pattern import CHOSEN as CHOSEN
from experiments.benchmarks.patterns.entries.pattern import LONG as LONG
from experiments.benchmarks.patterns.entries.pattern import MEDIUM as MEDIUM
from experiments.benchmarks.patterns.entries.pattern import Pattern as Pattern

PATTERNS: list[Pattern] = [
    *sequences.PATTERNS,
    *butterflies.PATTERNS,
    *factorized.PATTERNS,
    *graphs.PATTERNS,
    *grids.PATTERNS,
    *choices.PATTERNS,
]


def select(names: Sequence[str] | None) -> list[Pattern]:
    wanted = chosen("--only", names, [pattern.name for pattern in PATTERNS])
    return [pattern for pattern in PATTERNS if pattern.name in wanted]
