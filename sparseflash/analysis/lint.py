"""Finds common mistakes in masks before training does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparseflash.analysis import layers as model
from sparseflash.analysis.balance import Load, balance
from sparseflash.analysis.coarsening import coarsening
from sparseflash.analysis.composition import TooManyTiles
from sparseflash.analysis.layers import Masks, elements
from sparseflash.analysis.order import live_tiles_in_order
from sparseflash.analysis.reach import layers_to_full_reach
from sparseflash.analysis.tokens import blind_queries, future_scores, unseen_keys
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import BLOCKS, flag, integer
from sparseflash.blockmask.stats import live_tokens
from sparseflash.blockmask.walks import Walk, walks

Severity = Literal["error", "warning", "note"]

UNEVEN = 4.0  # limit for the most tiles of a row over the mean
SPARSE = 0.1  # limit for the live share of a sparse tile
SHARE_OF_TILES = 0.1  # least share of sparse tiles that is reported,
WASTE = 2.0  # and least number of computed scores per live score
BETTER = 1.5  # improvement that makes another block worth suggesting
FEWER = 0.75  # share of tiles at which another token order is worth suggesting


@dataclass(frozen=True)
class Finding:
    """One likely mistake: a message with numbers and a remedy, and the place (empty: everywhere).

    >>> print(Finding("empty-queries", "warning", "4 of 100 queries see no key.", "head 2"))
    warning [empty-queries] head 2: 4 of 100 queries see no key.

    `code` is stable, for filtering. `severity`: an "error" contradicts what was declared, a "warning" is seldom
    intended, a "note" costs speed.
    """

    code: str
    severity: Severity
    message: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.severity} [{self.code}]{f' {self.where}' if self.where else ''}: {self.message}"


def lint(
    masks: Masks, *, causal: bool = False, layers: int | None = None, orders: Mapping[str, Tensor] | None = None
) -> list[Finding]:
    """The mistakes found in a mask, or in the masks of a model's layers; an empty list if none is found.

    >>> for finding in lint(BlockMask.from_function(lambda q, k: k <= q + 1, 256, block=64), causal=True):
    ...     print(finding)
    error [future-leak]: 255 live scores lie in the future, the first at query 0, key 1. Intersect with the causal mask.
    >>> lint(BlockMask.from_function(lambda q, k: k <= q, 256, block=64), causal=True)
    []

    Args:
        masks: one mask for every layer, or one per layer, first layer first.
        causal: no query may see a later key (`k > q + k_len - q_len`).
        layers: the number of layers of the model, which is compared with the number that connects everything; a list of
            masks is repeated.
        orders: alternative token orders, by name; new token t is old token `order[t]`.

    All checks are exact, token by token:

    | code | severity | found if |
    |---|---|---|
    | `future-leak` | error | `causal`, and a live score lies in the future |
    | `empty-queries` | warning | a query sees no key: its output is 0 |
    | `empty-keys` | warning | a key is seen by no query of its head |
    | `one-length-for-two` | warning | one length cuts both queries and keys, although their numbers differ |
    | `never-connects` | warning | some token can never influence another (causal: a later one), at any depth |
    | `too-few-layers` | warning | `layers` is too small to connect everything |
    | `sparse-tiles` | warning | a tenth of the live tiles have under 10 % live scores, and half of the work is dead |
    | `token-order` | note | one of `orders` has under three quarters of the live tiles |
    | `uneven-rows`, `uneven-columns` | note | a block row or column has over four times the mean of live tiles |
    | `not-checked` | note | a check would be too expensive: which one, and what to do |

    Connectivity is checked only for masks with as many queries as keys, also of each sequence; a mask without live
    scores in the future is treated as causal. Packed documents never connect, and global tokens make uneven rows:
    ignore these findings.

    Raises ValueError as `reach` does for masks that cannot be layers of one model, and for an order that is not a
    permutation.
    """
    every, causal = model.listed(masks), flag(causal, "causal")
    # A single cross-attention mask is not a layer whose output is the next layer's input.
    together = not (len(every) == 1 and _tells_queries_from_keys(every[0]))
    if together:
        every = model.checked(every)
    if layers is not None and integer(layers, "layers", "layers") < 1:
        raise ValueError(f"layers must be at least 1; got {layers}.")
    if orders is not None and not isinstance(orders, Mapping):
        raise TypeError(f"orders must be a dict from names to orders of the tokens; got {type(orders).__name__}.")
    found: list[Finding] = []
    leaks = 0
    seen: dict[int, list[int]] = {}
    for number, mask in enumerate(every):
        seen.setdefault(id(mask), []).append(number)
    for numbers in seen.values():
        mask = every[numbers[0]]
        where = "" if len(seen) == 1 else f"layer {_some(numbers)}"
        leak = list(_future(mask, where))
        leaks += len(leak)
        found += leak if causal else []
        found += _empty(mask, where)
        found += _cut_by_one_number(mask, where)
        found += _sparse(mask, where, orders or {})
        found += _uneven(mask, where)
    if together and not (causal and leaks):
        # A mask without live scores in the future is taken to be causal, declared or not.
        found += _connected(every, not leaks, layers)
    rank = {"error": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda finding: rank[finding.severity])


def _tells_queries_from_keys(mask: BlockMask) -> bool:
    return mask.q_len != mask.k_len or (mask.lengths is not None and any(q != k for q, k in live_tokens(mask)))


def _future(mask: BlockMask, where: str) -> Iterator[Finding]:
    for walk in walks(mask):
        count, first = future_scores(walk, mask.k_len - mask.q_len)
        if first is not None:
            yield Finding(
                "future-leak", "error",
                f"{count:,} live scores lie in the future, the first at query {first[0]}, key {first[1]}. Intersect "
                "with the causal mask.",
                _place(mask, walk.users, where),
            )  # fmt: skip


def _empty(mask: BlockMask, where: str) -> Iterator[Finding]:
    for walk in walks(mask):
        place = _place(mask, walk.users, where)
        blind, unseen = blind_queries(walk), unseen_keys(walk)
        if len(blind):
            yield Finding(
                "empty-queries", "warning",
                f"{len(blind):,} of {walk.q_stop:,} queries see no key, so their output is 0: {_ranges(blind)}. Let "
                "each see itself, for example.",
                place,
            )  # fmt: skip
        if len(unseen):
            yield Finding(
                "empty-keys", "warning",
                f"{len(unseen):,} of {walk.k_stop:,} keys are seen by no query: {_ranges(unseen)}. Their values have "
                "no effect.",
                place,
            )  # fmt: skip


def _cut_by_one_number(mask: BlockMask, where: str) -> Iterator[Finding]:
    if mask.lengths is None or mask.q_len == mask.k_len:
        return
    found = live_tokens(mask)
    both = [q for q, k in found if q == k < max(mask.q_len, mask.k_len)]
    keys = [k for _, k in found if k < mask.k_len]
    cache = f"masks.per_batch of masks.causal({mask.q_len}, {mask.k_len}, offset=length - {mask.q_len})"
    if both:
        yield Finding(
            "one-length-for-two", "warning",
            f"a length of {min(both):,} cuts both the {mask.q_len:,} queries and the {mask.k_len:,} keys, and does not "
            "move the diagonal. For separate lengths use mask.with_lengths(q_lengths=..., k_lengths=...); for a cache "
            f"{cache}.",
            where,
        )  # fmt: skip
    elif keys:
        yield Finding(
            "one-length-for-two", "note",
            f"the {mask.k_len:,} keys are cut at {min(keys):,}, which does not move the diagonal: right for "
            f"cross-attention; for a cache use {cache}.",
            where,
        )  # fmt: skip


def _sparse(mask: BlockMask, where: str, orders: Mapping[str, Tensor]) -> Iterator[Finding]:
    total = sum(len(walk.users) * int((walk.live() > 0).sum()) for walk in walks(mask))
    sparse = sum(len(walk.users) * int(_is_sparse(walk).sum()) for walk in walks(mask))
    own = coarsening(mask, [(mask.block_q, mask.block_k)])[0]
    if sparse > SHARE_OF_TILES * total and own.over_coverage >= WASTE:
        smaller = [block for block in BLOCKS if block < max(mask.block_q, mask.block_k)]
        others = coarsening(mask, smaller)
        better = [entry for entry in others if entry.over_coverage * BETTER <= own.over_coverage]
        least = min((entry.over_coverage for entry in better), default=0.0)
        best = max((e for e in better if e.over_coverage <= 1.25 * least), key=lambda e: e.block_q, default=None)
        remedy = (
            "No smaller block does much better; another token order might: pass some as orders=."
            if best is None
            else f"Blocks of {best.block_q} would compute {best.over_coverage:.3g}."
        )
        yield Finding(
            "sparse-tiles", "warning",
            f"{sparse:,} of {total:,} live tiles hold under {100 * SPARSE:.0f} % live scores; {own.over_coverage:.3g} "
            f"scores are computed for each live one. {remedy}",
            where,
        )  # fmt: skip
    counts = {name: live_tiles_in_order(mask, order) for name, order in orders.items()}
    name = min(counts, key=counts.__getitem__, default="")
    if counts and counts[name] < FEWER * total:
        yield Finding(
            "token-order", "note",
            f"in the order {name!r} the mask has {counts[name]:,} live tiles instead of {total:,}. Permute the tokens "
            "and the mask accordingly.",
            where,
        )  # fmt: skip


def _is_sparse(walk: Walk) -> Tensor:
    queries = (walk.q_stop - walk.rows * walk.block_q).clamp(max=walk.block_q)
    keys = (walk.k_stop - walk.cols * walk.block_k).clamp(max=walk.block_k)
    live = walk.live()
    return (live > 0) & (live < SPARSE * (queries * keys))


def _uneven(mask: BlockMask, where: str) -> Iterator[Finding]:
    for entry in balance(mask):
        sides: tuple[tuple[str, Load, str], ...] = (
            ("rows", entry.rows, "forward and dQ"),
            ("columns", entry.columns, "dK and dV"),
        )
        for side, load, what in sides:
            if load.tiles.ratio > UNEVEN:
                yield Finding(
                    f"uneven-{side}", "note",
                    f"a block {side[:-1]} holds {load.tiles.most:,} live tiles, {load.tiles.ratio:.3g} times the mean "
                    f"of {load.tiles.mean:.3g}: {what} may wait for it on a short batch. Larger batches hide it.",
                    _place(mask, entry.users, where),
                )  # fmt: skip


def _connected(every: list[BlockMask], causal: bool, layers: int | None) -> Iterator[Finding]:
    from sparseflash.analysis.connectivity import causal_gap, gap  # late: only this needs scipy

    try:
        if not causal or layers is not None:
            model.check_size(every)
    except ValueError as error:
        yield _not_checked(error)
        if not causal:
            return
        layers = None
    connected = True
    all_elements = elements(every)
    for element in dict.fromkeys(all_elements):
        try:
            found = causal_gap(element) if causal else gap(element)
        except TooManyTiles as error:
            yield _not_checked(error)
            return
        if found is None:
            continue
        connected = False
        alone = "" if len(all_elements) == 1 else f"batch element {all_elements.index(element)}"
        groups = (
            f"the tokens fall into {found.groups:,} groups that exchange nothing" if found.groups > 1
            else f"query {found.query} is never influenced by key {found.key}, however many layers there are"
        )  # fmt: skip
        yield Finding(
            "never-connects", "warning",
            f"{groups}. Unless they are documents, add a factor, a window or a global token that connects them.", alone,
        )  # fmt: skip
    if layers is not None and connected:
        try:
            needed = layers_to_full_reach(every, causal=causal)
        except TooManyTiles as error:
            yield _not_checked(error)
            return
        if needed is not None and needed > layers:
            yield Finding(
                "too-few-layers", "warning",
                f"it takes {needed:,} layers until every query is influenced by every "
                f"{'earlier ' if causal else ''}key; the model has {layers:,}.",
            )  # fmt: skip


def _not_checked(error: ValueError) -> Finding:
    return Finding("not-checked", "note", f"whether, or how soon, all tokens connect: {error}")


def _place(mask: BlockMask, users: tuple[tuple[int, int], ...], where: str) -> str:
    batch, heads = mask.shape[:2]
    parts = [where] if where else []
    if batch > 1:
        parts.append(f"batch element {_some(sorted({b for b, _ in users}))}")
    if heads > 1:
        parts.append(f"head {_some(sorted({h for _, h in users}))}")
    return ", ".join(parts)


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")


def _ranges(tokens: Tensor) -> str:
    starts = torch.cat([tokens[:1], tokens[1:][tokens.diff() > 1]])
    ends = torch.cat([tokens[:-1][tokens.diff() > 1], tokens[-1:]])
    runs = [str(a) if a == b else f"{a}..{b}" for a, b in zip(starts[:3].tolist(), ends[:3].tolist(), strict=True)]
    return ", ".join(runs) + (f" and {len(starts) - 3} more runs" if len(starts) > 3 else "")
