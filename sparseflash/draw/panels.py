"""The distinct pictures of a mask: one for each pattern (and padded length) that its heads and batch elements use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparseflash.blockmask.arguments import checked_mask, integer
from sparseflash.blockmask.stats import live_tokens

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask

Choice = int | Iterable[int] | None


@dataclass(frozen=True)
class Panel:
    """One picture: the number of its pattern, the live queries and keys (None: all), and a title that says who uses it.

    >>> from sparseflash import masks
    >>> panels(masks.causal(64, block=16))
    [Panel(pattern=0, lengths=None, title='')]
    """

    pattern: int
    lengths: tuple[int, int] | None  # numbers of queries and keys
    title: str  # "" if it is the only panel


def panels(mask: BlockMask, heads: Choice = None, batch: Choice = None, *, by_head: bool = False) -> list[Panel]:
    """The distinct pictures of the selected heads and batch elements (by default all), in order of first appearance.

    >>> import torch
    >>> from sparseflash import BlockMask
    >>> layout = torch.eye(4, dtype=torch.bool).repeat(4, 1, 1)
    >>> layout[2] = True
    >>> [panel.title for panel in panels(BlockMask.from_layout(layout, block=16))]
    ['heads 0, 1, 3', 'head 2']
    >>> panels(BlockMask.from_layout(layout, block=16), heads=3)
    [Panel(pattern=0, lengths=None, title='head 3')]

    by_head: a picture for each selected head of each batch element instead, equal ones, too.

    Raises ValueError if a head or batch element is out of range, or none is selected.
    """
    all_batch, all_heads = checked_mask(mask).shape[:2]
    chosen_heads = chosen("heads", heads, all_heads)
    chosen_batch = chosen("batch", batch, all_batch)
    pattern = mask.pattern.expand(all_batch, all_heads).tolist()
    lengths: list[tuple[int, int] | None] = [None] * all_batch
    if mask.lengths is not None:
        lengths = list(live_tokens(mask))
    if by_head:
        return [
            Panel(pattern[b][h], lengths[b], " · ".join([*([f"batch {b}"] if all_batch > 1 else []), f"head {h}"]))
            for b in chosen_batch
            for h in chosen_heads
        ]
    uses: dict[tuple[int, tuple[int, int] | None], dict[int, list[int]]] = {}
    for b in chosen_batch:
        for h in chosen_heads:
            uses.setdefault((pattern[b][h], lengths[b]), {}).setdefault(b, []).append(h)
    # A single picture of everything needs no title.
    shown = [
        (batch is not None or len(uses) > 1) and all_batch > 1,
        (heads is not None or len(uses) > 1) and all_heads > 1,
    ]
    found = []
    for (number, tokens), by_batch in uses.items():
        title = _title(by_batch, chosen_batch, chosen_heads, [batch is not None, heads is not None], shown)
        if tokens is not None:
            q, k = tokens
            words = f"{q:,} tokens" if q == k else f"{q:,} queries, {k:,} keys"
            title = f"{title} ({words})" if title else words
        found.append(Panel(number, tokens, title))
    return found


def chosen(name: str, choice: Choice, count: int) -> list[int]:
    """The numbers of a choice among `count`, each once, in its order."""
    if choice is None:
        return list(range(count))
    several = isinstance(choice, Iterable) and getattr(choice, "ndim", 1) > 0
    try:
        numbers = [integer(n, name, "") for n in (choice if several else [choice])]  # type: ignore[union-attr]
    except TypeError:
        raise TypeError(f"{name} must be an integer, several, or None; got {choice!r}.") from None
    if not numbers or not all(0 <= n < count for n in numbers):
        raise ValueError(f"{name} must be one or more of 0..{count - 1}; got {choice!r}.")
    return list(dict.fromkeys(numbers))


def _title(
    by_batch: dict[int, list[int]], batch: list[int], heads: list[int], asked: list[bool], shown: list[bool]
) -> str:
    """The users of a picture: `heads 0-3`, `batch 1`, `batch 0, 2 · head 5`, or a list if they are no product."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for b, of_head in by_batch.items():
        groups.setdefault(tuple(of_head), []).append(b)
    parts = []
    for users, of_batch in groups.items():
        names = []
        # Names an axis only if the caller selected on it, or not all of the selection is in this group.
        if shown[0] and (asked[0] or len(of_batch) < len(batch)):
            names.append(f"batch {_ranges(of_batch)}")
        if shown[1] and (asked[1] or len(users) < len(heads)):
            names.append(f"{'head' if len(users) == 1 else 'heads'} {_ranges(users)}")
        parts.append(" · ".join(names))
    most = 3
    return "; ".join(parts[:most]) + (f"; and {len(parts) - most} more" if len(parts) > most else "")


def _ranges(numbers: Iterable[int]) -> str:
    """`0, 2-5, 9`; shortened in the middle if there are very many."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = []
    for first, last in runs:
        words += (
            [f"{first}"] if first == last else [f"{first}", f"{last}"] if last == first + 1 else [f"{first}-{last}"]
        )
    return ", ".join(words if len(words) <= 8 else [*words[:6], "...", words[-1]])
