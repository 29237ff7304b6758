"""The `mask_mod` that FlexAttention gets for a mask: a rule that was found in the mask and checked against it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import noop_mask

from sparseflash import BlockMask, interop
from sparseflash.interop import mask_mods
from sparseflash.interop.mask_mods import Rule

SCORES = 2**34  # of a mask whose runs are looked for: 131,072 tokens squared, seconds on a GPU
SCORES_AT_ONCE = 2**27


def mask_mod_of(mask: BlockMask) -> Rule | None:
    """A rule that says which scores of every partial tile are live; None if none of the rules known here does.

    >>> from sparseflash import masks
    >>> rule = mask_mod_of(masks.local(1000, window=100, causal=True))
    >>> [bool(rule(0, 0, 500, k)) for k in (400, 401, 500, 501)]
    [False, True, True, False]
    >>> mask_mod_of(masks.neighborhood((32, 32), window=7)) is None
    True

    The rules are causal masks, windows, dilated windows, prefixes, windows with sinks or global tokens at the
    beginning, one run of keys for each query (documents, chunks), and each of these with padding. A rule is compared
    with all partial tiles, which are the only ones that compiled FlexAttention asks a `mask_mod` about.
    """
    if mask.lengths is not None and mask.lengths.shape[1] > 1:
        rule = mask_mod_of(replace(mask, lengths=None))
        rules = [] if rule is None else [mask_mods.padded(rule, *mask.lengths)]
        return _first_that_says(mask.bake_lengths(), rules)
    mask = mask.bake_lengths()
    return _first_that_says(mask, _guesses(mask))


def _first_that_says(mask: BlockMask, rules: Iterable[Rule]) -> Rule | None:
    flex = interop.to_flex(mask, mask_mod=noop_mask)
    batch, heads = mask.shape[:2]
    for rule in rules:
        flex.mask_mod = rule
        if interop.from_flex(flex, batch=batch, heads=heads) == mask:
            return rule
    return None


def _guesses(mask: BlockMask) -> Iterator[Rule]:
    offset, end = mask.k_len - mask.q_len, mask.q_len - 1
    yield noop_mask  # for a mask in which no tile is partial but at the end of the sequence
    yield mask_mods.causal(offset)
    first, last = _live_keys(mask, 0), _live_keys(mask, end)
    if len(first) and len(last):
        right, left = int(first[-1]), end - int(last[0])
        yield mask_mods.causal(right)
        yield mask_mods.window(left, right)
        yield mask_mods.prefix(right + 1, offset)
        steps = last.diff()
        wide = (steps > 1).nonzero()[:, 0]
        if len(wide) == 1:
            tokens, left = int(wide[0]) + 1, end - int(last[wide[0] + 1])
            yield mask_mods.sinks(tokens, left, offset)
            yield mask_mods.sinks(tokens, left, right)
            yield mask_mods.global_tokens(tokens, left, left)
        elif len(wide):
            yield mask_mods.dilated(left, right, int(steps[0]))
    if mask.pattern.numel() == 1 and mask.q_len * mask.k_len <= SCORES:
        yield mask_mods.runs(*_runs(mask))


def _live_keys(mask: BlockMask, row: int) -> Tensor:
    return mask.crop(q=(row, row + 1)).to_dense()[0, 0, 0].nonzero()[:, 0]


def _runs(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """The first live key of every query, and the one after its last; both 0 where it has none."""
    starts, stops = [], []
    step = max(1, SCORES_AT_ONCE // mask.k_len)
    for row in range(0, mask.q_len, step):
        live = mask.crop(q=(row, min(row + step, mask.q_len))).to_dense()[0, 0].to(torch.uint8)
        any_live = live.amax(1).long()
        starts.append(live.argmax(1) * any_live)
        stops.append((mask.k_len - live.flip(1).argmax(1)) * any_live)
    return torch.cat(starts), torch.cat(stops)
