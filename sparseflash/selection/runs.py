"""Masks of NSA's two branches that do not choose: the nearest keys, and all compressed keys of the past."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.cache import BoundedDict, once
from sparseflash.blockmask.compiling import constant_when_compiled, contents_when_faking
from sparseflash.masks.tiling.spans import spans
from sparseflash.selection.frame import Frame

_masks = BoundedDict(64)


def near_keys(frame: Frame, window: int) -> BlockMask:
    """A query sees the `window` keys up to its own, of its document."""
    return _mask(frame, frame.k_len, window, 0)


def past_blocks(frame: Frame, blocks: int, span: int, step: int) -> BlockMask:
    """A query sees block j, of keys `[step * j, step * j + span)`, if its document has begun and it has ended."""
    return _mask(frame, blocks, span, step)


def _mask(frame: Frame, k_len: int, span: int, step: int) -> BlockMask:
    if frame.packing is None:
        if torch.compiler.is_compiling():
            made: BlockMask = _made_constant(frame.start, frame.q_len, (), k_len, span, step).to(frame.device)
            return made
        return _kept(frame.start, frame.q_len, (), k_len, span, step, frame.device)
    found: BlockMask = _of_documents(frame.packing.stops, frame.q_len, k_len, span, step, frame.device)
    return found


@torch.compiler.disable(reason="the lengths of documents are read on the host")  # type: ignore[untyped-decorator]
def _of_documents(
    stops: tuple[int, ...], q_len: int, k_len: int, span: int, step: int, device: torch.device
) -> BlockMask:  # fmt: skip
    return _kept(0, q_len, stops, k_len, span, step, device)


def _kept(
    start: int, q_len: int, stops: tuple[int, ...], k_len: int, span: int, step: int, device: torch.device
) -> BlockMask:  # fmt: skip
    def make() -> BlockMask:
        with contents_when_faking():
            made = _made(start, q_len, stops, k_len, span, step)
        return made.to(device)

    return once(_masks, (start, q_len, stops, k_len, span, step, device), make)


def _made(start: int, q_len: int, stops: tuple[int, ...], k_len: int, span: int, step: int) -> BlockMask:
    place = torch.arange(start, start + q_len, device="cpu")
    first = _firsts(stops) if stops else torch.zeros_like(place)
    if step == 0:
        return spans(torch.maximum(first, place + 1 - span), place + 1, k_len)
    stop = (place + 1 - span).div(step, rounding_mode="floor") + 1
    return spans(first // step, stop, k_len)  # documents begin at multiples of `step`


_made_constant = constant_when_compiled(_made)


def _firsts(stops: tuple[int, ...]) -> Tensor:
    ends = torch.tensor(stops, device="cpu")
    rooms = ends.diff(prepend=ends.new_zeros(1))
    return (ends - rooms).repeat_interleave(rooms)
