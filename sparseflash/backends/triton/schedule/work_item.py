"""The layout of a work item, the int32 numbers that define the work of one program, and the index of each number."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl


class WorkItem(NamedTuple):
    """The first blocks of the list are stored here to save a program one dependent load before its first load of
    keys.
    """

    number: Any  # of batch, head and tile of tokens
    start: Any  # start, full and count of its list: see `TileLists`
    full: Any
    count: Any
    full_block: Any  # of the first full tile of the list
    partial_block: Any  # of the first partial tile
    partial_tile: Any  # the number of its bits
    part: Any  # number among all chunks of items that are cut, from 1; 0: not cut


class CutItem(NamedTuple):
    """The numbers of an item that is cut into chunks, whose partial results are merged."""

    number: Any  # of the item
    first_part: Any  # index of its first chunk among all chunks of items that are cut, from 0
    parts: Any  # number of its chunks
    unused: Any  # padding to 16 bytes


def place(item: type[NamedTuple], field: str) -> tl.constexpr:
    """The index of a field in an item.

    >>> place(WorkItem, "start").value
    1
    """
    return tl.constexpr(item._fields.index(field))


ITEM = tl.constexpr(len(WorkItem._fields))
ITEM_NUMBER = place(WorkItem, "number")
ITEM_START = place(WorkItem, "start")
ITEM_FULL = place(WorkItem, "full")
ITEM_COUNT = place(WorkItem, "count")
ITEM_FULL_BLOCK = place(WorkItem, "full_block")
ITEM_PARTIAL_BLOCK = place(WorkItem, "partial_block")
ITEM_PARTIAL_TILE = place(WorkItem, "partial_tile")
ITEM_PART = place(WorkItem, "part")
CUT_ITEM = tl.constexpr(len(CutItem._fields))
CUT_NUMBER = place(CutItem, "number")
CUT_FIRST_PART = place(CutItem, "first_part")
CUT_PARTS = place(CutItem, "parts")
CUT_UNUSED = place(CutItem, "unused")
