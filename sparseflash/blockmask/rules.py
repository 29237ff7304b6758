"""From a rule, a function of positions, to its live tiles: the implementation of `BlockMask.from_function`."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparseflash.blockmask import bitmask
from sparseflash.blockmask.arguments import boolean, check_block_count, integer
from sparseflash.blockmask.build import SCORES_AT_ONCE, Part, tile_list
from sparseflash.blockmask.compiled_rules import call_rules
from sparseflash.blockmask.number import Number
from sparseflash.blockmask.vectorize import vectorized

_PAIRS_AT_ONCE = 1 << 22  # block pairs passed to a candidate function at a time

Live = Callable[..., Tensor]  # takes (q_idx, k_idx) or (b, h, q_idx, k_idx)
Candidates = Tensor | tuple[Tensor, Tensor] | Callable[[Tensor, Tensor], Tensor]


def tiles_of_rule(
    live: Live,
    batch: int | None,
    heads: int | None,
    q_len: int,
    k_len: int,
    block: tuple[int, int],
    candidates: Candidates | None,
    device: torch.device,
) -> tuple[list[Part], Tensor]:
    """The tiles of each distinct pattern of a rule, and the pattern number of each batch element and head, int64
    `[B, H]`; see `BlockMask.from_function`.
    """
    if not takes_numbers(live, batch, heads):
        part = _tiles(live, q_len, k_len, block, candidates, device)
        return [part], torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    batch, heads = (_at_least_one(n, name) for n, name in ((batch, "batch"), (heads, "heads")))
    parts: list[Part] = []
    number_of: dict[bytes, int] = {}
    numbers = torch.full((batch, heads), -1, dtype=torch.int64, device="cpu")
    for i in range(batch):
        while len(left := (numbers[i] < 0).nonzero()):
            j = int(left[0])
            b, h = Number(i, device), Number(j, device)
            part = _tiles(partial(live, b, h), q_len, k_len, block, candidates, device)
            digest = hashlib.blake2b(digest_size=16)  # recognises equal patterns, so that only one is kept
            for array in part:
                digest.update(array.cpu().numpy().tobytes() + repr(array.shape).encode())
            number = number_of.setdefault(digest.digest(), len(parts))
            if number == len(parts):
                parts.append(part)
            # A rule that did not read b (or h) has the same tiles for all b (or h).
            numbers[slice(i, i + 1) if b.is_read else slice(None), slice(j, j + 1) if h.is_read else slice(None)] = (
                number
            )
    return parts, numbers


def call_rule(
    cls: Any, live: Live, *_: Any, batch: Any = None, heads: Any = None, candidates: Any = None, **__: Any
) -> None:
    """Calls the functions given to `BlockMask.from_function` as it calls them, for torch.compile."""
    call_rules(2 if batch is None and heads is None else 4, live)
    call_rules(2, candidates)


def takes_numbers(live: Any, batch: int | None, heads: int | None) -> bool:
    """Whether to call a rule with the numbers of batch element and head, too."""
    if not callable(live):
        raise TypeError(f"live must be a function of positions (q_idx, k_idx); got {type(live).__name__}.")
    given = batch is not None or heads is not None
    signature, two, four = _arity(live)
    if not two and not four:
        raise TypeError(
            "live must take two arguments, the positions of queries and of keys, or four, the numbers of the batch "
            f"element and the head before them; got a function of {signature}."
        )
    if four and not two and not given:
        raise TypeError(
            "batch or heads must be given for a rule of four arguments (1 for one that it does not depend on), as in "
            f"from_function(live, q_len, batch=1, heads=8); got a function of {signature}."
        )
    if given and not four:
        raise TypeError(
            "live must take four arguments (b, h, q_idx, kv_idx) where batch or heads is given; got a function of "
            f"{signature}. Without them its mask is the same for all batch elements and heads."
        )
    return given


def _arity(live: Any) -> tuple[inspect.Signature | None, bool, bool]:
    """The signature, and whether the rule can be called with two arguments, and with four."""
    try:
        signature = inspect.signature(live)
    except ValueError:  # some C functions have no known signature
        return None, True, True

    def takes(count: int) -> bool:
        try:
            signature.bind(*[None] * count)
        except TypeError:
            return False
        return True

    return signature, takes(2), takes(4)


def _at_least_one(value: int | None, name: str) -> int:
    count = 1 if value is None else integer(value, name, "batch elements" if name == "batch" else name)
    if count < 1:
        raise ValueError(f"{name} must be at least 1; got {count}.")
    return count


def _tiles(
    live: Callable[[Tensor, Tensor], Tensor],
    q_len: int,
    k_len: int,
    block: tuple[int, int],
    candidates: Candidates | None,
    device: torch.device,
) -> Part:
    block_q, block_k = block
    row_blocks, col_blocks = -(-q_len // block_q), -(-k_len // block_k)
    if isinstance(candidates, tuple):
        rows, cols = tile_list(*candidates, row_blocks, col_blocks)
        candidates = rows.to(device), cols.to(device)
    elif candidates is not None and not callable(candidates):
        candidates = boolean(candidates, "candidates").to(device)
        if candidates.ndim != 2:
            raise ValueError(f"candidates must have shape [Mq, Mk]; got {list(candidates.shape)}.")
        check_block_count("candidates", candidates, q_len, k_len, block_q, block_k)
    found: list[Part] = []
    offset = 0
    for rows, cols in _candidate_pairs(candidates, row_blocks, col_blocks, device):
        for chosen in torch.arange(len(rows), device=device).split(max(1, SCORES_AT_ONCE // (block_q * block_k))):
            part = _evaluate(live, rows[chosen], cols[chosen], q_len, k_len, block_q, block_k)
            part[2][part[2] > 0] += offset
            offset += len(part[3])
            found.append(part)
    i, j, tile, words = (torch.cat(column) for column in zip(*found, strict=True))
    return i, j, tile, words


def _candidate_pairs(
    candidates: Candidates | None, row_blocks: int, col_blocks: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    if isinstance(candidates, tuple):
        yield candidates
        return
    all_cols = torch.arange(col_blocks, device=device)
    for rows in torch.arange(row_blocks, device=device).split(max(1, _PAIRS_AT_ONCE // col_blocks)):
        if candidates is None:
            layout = torch.ones(len(rows), col_blocks, dtype=torch.bool, device=device)
        elif callable(candidates):
            answer = _answer(candidates, "candidates", rows[:, None], all_cols[None, :])
            layout = answer.expand(len(rows), col_blocks)
        else:
            layout = candidates[rows]
        i, j = layout.nonzero(as_tuple=True)
        yield rows[i], j


def _answer(rule: Callable[[Tensor, Tensor], Tensor], name: str, q: Tensor, k: Tensor) -> Tensor:

    def checked(answer: Any) -> Tensor:
        if answer is None:
            raise TypeError(f"{name} must return bools, True where a score is live; got None: is a `return` missing?")
        return boolean(answer, f"what {name} returns")

    try:
        return checked(vectorized(rule, name, (q, k), checked))  # checked again: vmap hides the kind of a tensor
    except AttributeError as error:
        if not str(error).startswith("'int' object has no attribute"):
            raise
        raise TypeError(
            f"{name} must not call a mask_mod with plain numbers for the batch element and the head: and_masks and the "
            "like need tensors. Pass the mask_mod itself, from_function(mask_mod, q_len, batch=1, heads=1); "
            f"got {error}."
        ) from error


def _evaluate(
    live: Callable[[Tensor, Tensor], Tensor], rows: Tensor, cols: Tensor, q_len: int, k_len: int, block_q: int,
    block_k: int,
) -> Part:  # fmt: skip
    device = rows.device
    q = rows[:, None, None] * block_q + torch.arange(block_q, device=device)[None, :, None]
    k = cols[:, None, None] * block_k + torch.arange(block_k, device=device)[None, None, :]
    # A predicate that looks something up (a document number, say) must not get a position past the end.
    answer = _answer(live, "live", q.clamp(max=q_len - 1), k.clamp(max=k_len - 1))
    words = bitmask.pack(answer.expand(len(rows), block_q, block_k) & (q < q_len) & (k < k_len))
    kind, distinct = bitmask.classify(lambda some: some, words, block_q, block_k)
    live_tiles = kind >= 0
    return rows[live_tiles], cols[live_tiles], kind[live_tiles], distinct
