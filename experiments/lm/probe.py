"""Does a model use the far context? Losses on held-out text where a sentence or a name was read long before.

sentence: a passage of the same text, `distance` tokens back, is repeated at the end of the context.
name: a word of several tokens that begins with a capital occurs again, `distance` tokens after its first occurrence.

The control has the same tokens at the end and other tokens in the place of the first occurrence, so the difference is
what the far occurrence tells. Where queries choose blocks, the probe also counts how often they choose the block
of the token that they have to repeat.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.lm.data.store import Part
from experiments.lm.data.tokenizer import Tokenizer
from experiments.lm.model.chosen import Choices, choices_kept
from experiments.lm.model.transformer import LanguageModel

SENTENCE = 32  # tokens of a repeated passage
CUE = 8  # its first tokens, which tell what is repeated; the loss is of the others
DISTANCES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 49152)
_LONGEST_NAME = 8  # tokens
_SPACE = "Ġ"  # begins a word, in the alphabet of byte-level vocabularies


class Example(NamedTuple):
    tokens: np.ndarray
    control: np.ndarray
    first: int  # the losses of tokens[first : end]
    end: int
    distance: int  # tokens back to the first occurrence


@dataclass(frozen=True)
class Found:
    """Mean losses (nats a token) at one distance. gain: control - loss; error: its standard error. read: the share of
    queries that choose the block of the token that they have to repeat."""

    kind: str
    distance: int  # or the least of a range
    to: int
    examples: int
    loss: float
    control: float
    gain: float
    error: float
    read: float | None = None  # by the head that chooses the right block most often; None without choices
    read_mean: float | None = None  # over all heads of all layers that choose


def measured(
    model: LanguageModel, part: Part, tokenizer: Tokenizer, context: int, *, examples: int = 16, seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> list[Found]:  # fmt: skip
    if len(part) < 2 * context:
        raise ValueError(f"the text of a probe must have two contexts, {2 * context:,} tokens; it has {len(part):,}")
    found = []
    for distance in distances(context):
        random = np.random.default_rng([seed, distance])
        rows = [sentence(part, context, distance, random) for _ in range(examples)]
        found.append(scored(model, "sentence", distance, distance, rows))
        say(f"sentence {distance:,} tokens back: {found[-1].loss:.3f}, without it {found[-1].control:.3f}")
    names = list(repeated(part, names_of(part, tokenizer), context))
    for low, high in pairwise((*distances(context), context)):
        of_range = [each for each in names if low <= each.distance < high]
        random = np.random.default_rng([seed, low, 1])
        chosen = random.permutation(len(of_range))[:examples]
        if len(chosen) < 2:
            continue
        rows = [with_name(part, of_range[i], of_range, context, random) for i in chosen]
        found.append(scored(model, "name", low, high, rows))
        say(f"name {low:,} to {high:,} tokens back: {found[-1].loss:.3f}, without it {found[-1].control:.3f}")
    return found


def distances(context: int) -> list[int]:
    """The distances that a context holds.

    >>> distances(4096)
    [512, 1024, 2048]
    """
    return [distance for distance in DISTANCES if distance + SENTENCE < context]


def sentence(part: Part, context: int, distance: int, random: np.random.Generator) -> Example:
    begin, elsewhere = random.integers(0, len(part) - context - 1, 2)
    tokens = np.array(part.tokens[begin : begin + context + 1], np.int64)
    end = context + 1
    source = slice(end - SENTENCE - distance, end - distance)
    tokens[end - SENTENCE :] = tokens[source]
    control = tokens.copy()
    control[source] = part.tokens[elsewhere : elsewhere + SENTENCE]
    return Example(tokens, control, end - SENTENCE + CUE, end, distance)


class Word(NamedTuple):
    begin: int
    tokens: tuple[int, ...]


class Repeated(NamedTuple):
    first: Word
    second: int

    @property
    def distance(self) -> int:
        return self.second - self.first.begin


def names_of(part: Part, tokenizer: Tokenizer) -> list[Word]:
    spelled = getattr(tokenizer, "spelled", None)
    if spelled is None:
        return []
    texts = [spelled(token) for token in range(tokenizer.size)]
    begins = np.array([len(text) > 1 and text[0] == _SPACE and text[1].isupper() for text in texts])
    goes_on = np.array([text.isascii() and text.isalpha() for text in texts])
    tokens = np.asarray(part.tokens)
    starts = np.flatnonzero(begins[tokens[:-1]] & goes_on[tokens[1:]])
    words = []
    for start in starts.tolist():
        end = start + 2
        while end < min(len(tokens), start + _LONGEST_NAME) and goes_on[tokens[end]]:
            end += 1
        words.append(Word(start, tuple(tokens[start:end].tolist())))
    return words


def repeated(part: Part, words: Sequence[Word], context: int) -> Iterator[Repeated]:
    before: dict[tuple[int, ...], list[int]] = {}
    document = np.asarray(part.starts)
    for word in words:
        places = before.setdefault(word.tokens, [])
        end = word.begin + len(word.tokens)
        inside = [place for place in places if place >= end - context - 1]
        whole = np.searchsorted(document, word.begin, "right")
        if len(inside) == 1 and end > context and np.searchsorted(document, inside[0], "right") == whole:
            yield Repeated(Word(inside[0], word.tokens), word.begin)
        places.append(word.begin)


def with_name(
    part: Part, found: Repeated, others: Sequence[Repeated], context: int, random: np.random.Generator
) -> Example:
    size = len(found.first.tokens)
    end = found.second + size
    begin = end - context - 1
    tokens = np.array(part.tokens[begin:end], np.int64)
    control = tokens.copy()
    names = [each.first.tokens for each in others if len(each.first.tokens) == size] or [found.first.tokens]
    different = [name for name in names if name != found.first.tokens]
    if different:
        other = different[int(random.integers(len(different)))]
    else:  # no other name of this length: tokens of the text
        place = int(random.integers(0, len(part) - size))
        other = tuple(part.tokens[place : place + size].tolist())
    place = found.first.begin - begin
    control[place : place + size] = other
    return Example(tokens, control, context + 1 - size + 1, context + 1, found.distance)


@torch.no_grad()
def scored(model: LanguageModel, kind: str, low: int, high: int, rows: Sequence[Example]) -> Found:
    device = model.embedding.weight.device
    losses: list[tuple[float, float]] = []
    chosen: list[Tensor] = []
    model.eval()
    for row in rows:
        both = torch.from_numpy(np.stack([row.tokens, row.control])).to(device)
        with choices_kept(model) as choices:
            mine_first = model(both[:1, :-1], both[:1, 1:], each=True)
        chosen += [right_blocks(row, choices)] if choices else []
        found = torch.cat([mine_first, model(both[1:, :-1], both[1:, 1:], each=True)])
        mine, control = found[:, row.first - 1 : row.end - 1].float().mean(1).tolist()
        losses.append((mine, control))
    gains = [control - mine for mine, control in losses]
    error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
    mine, control = (statistics.fmean(column) for column in zip(*losses, strict=True))
    read = torch.cat(chosen, 1).mean(1) if chosen else None  # of each head
    shares = (None, None) if read is None else (float(read.max()), float(read.mean()))
    return Found(kind, low, high, len(rows), mine, control, statistics.fmean(gains), error, *shares)


def right_blocks(row: Example, choices: Sequence[Choices]) -> Tensor:
    """Which heads, of all layers, choose the block of the token to be repeated: [heads, queries], 0 or 1."""
    source = torch.arange(row.first, row.end) - row.distance
    found = []
    for each in choices:
        index = each.index[0, :, row.first - 1 : row.end - 1].cpu()  # [H, queries, K]
        found.append((index == (source // each.block)[None, :, None]).any(2).float())
    return torch.cat(found)
