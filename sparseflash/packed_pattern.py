"""Finds which masks a function of the length makes for packed sequences, without computing them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.recorded import Call, Recording, Runs, recorded
from sparseflash.masks.butterfly import butterfly
from sparseflash.masks.causal import causal
from sparseflash.masks.chunked import chunked
from sparseflash.masks.dense import dense
from sparseflash.masks.local import dilated, local
from sparseflash.masks.log_sparse import log_sparse
from sparseflash.masks.sparse_transformer import strided
from sparseflash.masks.streaming import a_shape, streaming
from sparseflash.masks.tiling.spans import spans_of_heads
from sparseflash.pattern import Pattern, of_lengths

# A mask of n tokens is the first n rows and columns of a longer one, unless an argument in OF_ONE_LENGTH is given.
NESTED: tuple[Any, ...] = (causal, dense, local, dilated, chunked, streaming, a_shape, strided, log_sparse, butterfly)
_RECORDED = {each.__wrapped__: each for each in NESTED}
OF_ONE_LENGTH = frozenset(("q_len", "k_len", "factors", "strides", "layer"))
Found = partial[BlockMask] | list[Runs]  # the one call that makes all masks, or the runs of each mask
FEW_LENGTHS = 64  # up to this many, asking a family for runs takes less time than cutting its longest mask


def asked_for(pattern: Pattern, lengths: list[int]) -> tuple[list[Found], dict[tuple[int, int], BlockMask]]:
    """`(what was found of each head, {})`, where equal heads are one object; or `([], the masks by their sizes)`."""
    with recorded(_RECORDED, OF_ONE_LENGTH) as recording:
        masks = {(length, length): pattern(length) for length in lengths}
        heads = _heads_of(recording, list(masks.values()), lengths)
        if heads:
            masks.clear()  # masks that the function did not keep are never computed
            return heads, masks
    return [], {size: of_lengths(mask, *size) for size, mask in masks.items()}


def _heads_of(recording: Recording, masks: list[Any], lengths: list[int]) -> list[Found]:
    by_length = [recording.heads_of(mask) or [mask] for mask in masks]
    if len(set(map(len, by_length))) > 1:
        return []
    known: dict[Any, Found | None] = {}
    heads = []
    for of_head in zip(*by_length):
        calls = [recording.calls.get(id(mask)) for mask in of_head]
        key = tuple(id(mask) if call is None else call.key for mask, call in zip(of_head, calls))
        if key not in known:
            known[key] = _found(recording, of_head, calls, lengths)
        heads.append(known[key])
    found = [each for each in heads if each is not None]
    return found if len(found) == len(heads) else []


def _found(
    recording: Recording, masks: Sequence[Any], calls: list[Call | None], lengths: list[int]
) -> Found | None:  # fmt: skip
    """The runs of one head's masks, or the call of a nested family that makes them, whichever takes less time."""
    call = _one_call(calls, lengths)
    runs = None if call is not None and len(lengths) > FEW_LENGTHS else _runs_of_all(recording, masks, lengths)
    return runs or call


def _runs_of_all(recording: Recording, masks: Sequence[Any], lengths: list[int]) -> list[Runs] | None:
    """The runs of each mask, if all are of runs and of equal blocks."""
    found: list[Runs] = []
    for length, mask in zip(lengths, masks, strict=True):
        runs = recording.runs_of(mask)
        if runs is None or not runs.q_len == runs.k_len == length or runs.block != (*found, runs)[0].block:
            return None
        found.append(runs)
    return found


def packed_runs(runs: list[Runs], sizes: list[int]) -> BlockMask:
    """The mask of sequences of these sizes, each with the runs of its length."""
    lengths = np.array([each.q_len for each in runs])
    first = dict(zip(lengths.tolist(), (lengths.cumsum() - lengths).tolist()))
    size = np.array(sizes)
    begin = size.cumsum() - size
    at = np.arange(size.sum()) + (np.array([first.get(each, 0) for each in sizes]) - begin).repeat(size)
    ends = np.minimum(np.maximum(np.concatenate([each.ends for each in runs], 1), 0), lengths.repeat(lengths))
    made = torch.from_numpy(ends[:, at] + begin.repeat(size))
    second = None if torch.equal(made[2], made[3]) else (made[2], made[3])
    return spans_of_heads(made[0], made[1], len(at), [(None, None)], [0], second=second, block=runs[0].block)


def _one_call(calls: list[Call | None], lengths: list[int]) -> partial[BlockMask] | None:
    first = calls[0]
    if first is None or any(
        call is None or (call.key, call.length) != (first.key, length) for call, length in zip(calls, lengths)
    ):
        return None
    return partial(_RECORDED[first.family], **first.options)
