"""What `bench` measures: models, contexts, patterns and implementations, as text on the command line."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from experiments.lm.model.attention import IMPLEMENTATIONS
from experiments.lm.presets import settings_of
from sparseflash.cli.pattern_text import parts

DEFAULT = (
    "124M:2K,8K:dense:sparseflash,sdpa,flex",
    "124M:16K,64K:dense:sparseflash,sdpa,flex",
    "124M:16K,64K:local|butterfly:sparseflash",
    "350M,760M,1.3B:2K,8K:dense:sparseflash,sdpa,flex",
)


class Case(NamedTuple):
    preset: str
    context: int
    pattern: str
    attention: str
    recorded: bool = False  # CUDA graphs

    @property
    def implementation(self) -> str:
        return f"{self.attention}, recorded" if self.recorded else self.attention


def parsed(text: str) -> list[Case]:
    """All combinations in "presets:contexts:patterns:implementations"; commas separate values, K means 1,024.

    >>> parsed("124M:2K,512:dense:sparseflash")
    [Case(preset='124M', context=2048, pattern='dense', attention='sparseflash', recorded=False),
     Case(preset='124M', context=512, pattern='dense', attention='sparseflash', recorded=False)]

    + joins alternating layers.
    """
    words = parts(text, ":")
    fields = [parts(field, ",") for field in (*words[:2], ":".join(words[2:-1]), words[-1])]
    if len(words) < 4 or not all(all(field) for field in fields):
        raise ValueError(
            f"a case must be presets:contexts:patterns:implementations, such as {DEFAULT[0]}; got {text!r}"
        )
    presets, contexts, patterns, implementations = fields
    for preset in presets:
        settings_of(preset)
    for implementation in implementations:
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"the implementations of a case must be from {', '.join(IMPLEMENTATIONS)}; got {implementation!r}"
            )
    lengths = [length(context) for context in contexts]
    patterns = [",".join(parts(pattern, "+")) for pattern in patterns]
    return [Case(*each) for each in product(presets, lengths, patterns, implementations)]


def length(text: str) -> int:
    """K means 1,024.

    >>> length("64K"), length("1000")
    (65536, 1000)
    """
    number = text.strip().removesuffix("K")
    if not number.isdecimal() or int(number) == 0:
        raise ValueError(f"a context must be a number of tokens, such as 2048 or 2K; got {text!r}")
    return int(number) * (1024 if text.strip().endswith("K") else 1)
