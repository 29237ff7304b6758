"""Score modifications of a call whose query heads become rows of one head, as in `selected_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from sparseflash.blockmask.cache import BoundedDict
from sparseflash.scores.change import Change, Scores, Sizes, check_placed
from sparseflash.scores.function import Function
from sparseflash.scores.positions import Located, of_located

_REFUSED = "tile_bias, which has values for the tiles of a mask that stays the same"
_functions = BoundedDict(32)


def in_rows(
    given: Scores, sizes: Sizes, kv_heads: int, rows: int, placed: Callable[[Tensor], Tensor],
    tokens: Tensor | None = None,
) -> tuple[Scores | None, Tensor | None]:  # fmt: skip
    """The modifications for queries `[B, Hkv, Nq * rows, D]`, and the logits `[Hq]` of a sink, which joins later.

    >>> from sparseflash import scores
    >>> values = scores.temperature(torch.tensor([1.0, 2.0, 3.0, 4.0])) + scores.sink(torch.zeros(4))
    >>> changes, logits = in_rows(values, Sizes(1, 4, 3, 5, torch.device("cpu")), 2, 16, lambda x: x)
    >>> changes.kinds, changes.tensors()[0].shape, logits.shape
    (('temperature',), torch.Size([1, 2, 48]), torch.Size([4]))

    sizes: of the call, with Hq heads. placed: puts a tensor's last dimension, of keys, where the call has put the keys;
    tokens: the token at each place, int64, if it is another.

    Changes by head and position (`alibi`, `log_decay`, `relative`, `function`) become one function of rows.

    Raises ValueError for tile_bias, for a key_bias of each query head, and for a function with kernels of its own.
    """
    found: list[Change] = []
    by_place: dict[str, Change] = {}
    logits = None
    group = sizes.heads // kv_heads
    check_placed(given, "of selected_attention")
    if given.find("tile_bias") is not None:  # before it is checked against a mask
        _refuse(_REFUSED)
    for change in given.prepared(sizes).changes:
        if change.kind in ("distance", "relative", "function"):
            by_place[change.kind] = change
            continue
        if change.kind == "sink":
            (logits,) = change.tensors()
        elif change.kind == "softcap":
            found.append(change)
        elif change.kind == "temperature":
            (x,) = change.tensors()
            found.append(change.with_tensors([_rows(x.expand(-1, sizes.heads, sizes.q_len), kv_heads, rows, 1.0)]))
        elif change.kind == "key_bias":
            (x,) = change.tensors()
            if x.shape[1] > 1 and group > 1:
                _refuse("a key_bias for each query head of a group that shares its keys")
            found.append(change.with_tensors([x if x.shape[-1] == 1 else placed(x)]))
        else:
            (x,) = change.tensors()
            x = x if x.shape[-1] == 1 else placed(x)
            x = x.expand(-1, sizes.heads, -1, -1).unflatten(1, (kv_heads, group)).transpose(2, 3)
            x = torch.nn.functional.pad(x, (0, 0, 0, rows - group))
            found.append(change.with_tensors([x.flatten(2, 3)]))
    if by_place:
        found.append(_of_places(by_place, sizes, kv_heads, rows, tokens))
    return Scores(tuple(found)) if found else None, logits


class _Rule(NamedTuple):
    group: int
    rows: int
    shift: int
    is_log: int | None  # None: no distance
    has_relative: bool
    has_tokens: bool

    def made(self, own: Function | None) -> Function:
        def locate(b: Tensor, h: Tensor, q: Tensor, k: Tensor, given: list[Tensor]) -> Located:
            row = q % self.rows
            row = row if self.rows == self.group else row.clamp(max=self.group - 1)  # the others are padding
            key = given.pop(0)[k] if self.has_tokens else k
            return Located(b, h * self.group + row, q // self.rows, key, self.shift, (h, row))

        return of_located(locate, own, self.is_log, has_table=self.has_relative)


def _of_places(
    given: dict[str, Change], sizes: Sizes, kv_heads: int, rows: int, tokens: Tensor | None
) -> Function:  # fmt: skip
    tensors: list[Tensor] = [] if tokens is None else [tokens]
    is_log, own = None, given.get("function")
    if distance := given.get("distance"):
        (slopes,), (is_log,) = distance.tensors(), map(int, distance.numbers())
        tensors.append(_of_rows(slopes, kv_heads, rows))
    if relative := given.get("relative"):
        table, *codes = relative.tensors()
        tensors += [_of_rows(table, kv_heads, rows), *codes[:3]]
    if own is not None:
        assert isinstance(own, Function)
        if own.kernel is not None:
            _refuse("a function with kernel=, which knows no rows of heads")
        tensors += own.tensors()
    rule = _Rule(
        sizes.heads // kv_heads, rows, sizes.k_len - sizes.q_len, is_log, relative is not None, tokens is not None
    )
    make = torch.compiler.disable(_kept) if torch.compiler.is_dynamo_compiling() else _kept
    return make(rule, own).with_tensors(tensors)


def _kept(rule: _Rule, own: Function | None) -> Function:
    """`rule.made(own)`, once: a new function would be recorded anew. Dynamo cannot look for the one that is kept."""
    key = rule, None if own is None else own.identity
    made: Function = _functions.get(key) or _functions.put(key, rule.made(own))
    return made


def _of_rows(x: Tensor, kv_heads: int, rows: int) -> Tensor:
    x = x.unflatten(0, (kv_heads, -1))
    return torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, rows - x.shape[1]))


def _rows(x: Tensor, kv_heads: int, rows: int, value: float) -> Tensor:
    x = x.unflatten(1, (kv_heads, -1)).transpose(2, 3)
    return torch.nn.functional.pad(x, (0, rows - x.shape[-1]), value=value).flatten(2, 3)


def _refuse(what: str) -> NoReturn:
    raise ValueError(
        f"scores of selected_attention must not be {what}. Use attention with the mask of the same blocks, "
        "masks.selected_keys(index, k_len=Nk, span=span, group=group)."
    )
