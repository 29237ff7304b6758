"""FlexAttention's `score_mod`: score modifications of `sparseflash.scores` where they are recognised."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from sparseflash import scores
from sparseflash.captured import Captured
from sparseflash.interop.distances import affine, by_distance
from sparseflash.interop.indexed import Indexed
from sparseflash.scores.change import Change, Scores
from sparseflash.scores.expression import Node
from sparseflash.scores.relative import Bucket
from sparseflash.scores.tracing import Recorded, recorded

_CPU = torch.device("cpu")
Asked = Callable[[], bool]

_SCORE = 0  # the node of every expression that is the score


def from_score_mod(
    score_mod: Callable[..., Tensor], q_len: int, k_len: int | None = None, *, device: torch.device | str = _CPU
) -> Scores:
    """The score modifications of `sparseflash.scores` for a `score_mod(score, b, h, q_idx, kv_idx)` of FlexAttention.

    >>> slopes, bias, table = torch.tensor([0.5, 0.25]), torch.randn(2, 64, 64), torch.randn(2, 17)
    >>> from_score_mod(lambda s, b, h, q, k: s - slopes[h] * (q - k).abs() + bias[h, q, k], 64).kinds
    ('distance', 'bias')
    >>> from_score_mod(lambda s, b, h, q, k: s + table[h, (k - q).clamp(-8, 8) + 8], 64).kinds
    ('relative',)
    >>> from_score_mod(lambda s, b, h, q, k: 20 * torch.tanh(s / 20), 64).kinds
    ('softcap',)
    >>> from_score_mod(lambda s, b, h, q, k: torch.where(q % 2 == 0, s, 2 * s), 64).kinds
    ('function',)

    Args:
        score_mod: a function of scalar tensors.
        q_len, k_len: the lengths of the attention; k_len is q_len by default. The result is valid for these lengths
            only.
        device: of the tensors that the function reads.

    It recognises, in this order, the score divided by an entry for b, h and q (`temperature`),
    `cap * tanh(score / cap)` (`softcap`), and a sum with these, in any order. Their tensors may be learned:

    - `slopes[h] * d` or `slopes[h] * log1p(d)` (`alibi`, `log_decay`), where d is `(q + Nk - Nq - k).abs()`, and with
      numbers as factors;
    - entries of a table at h and a bucket of the distance (`relative`): any integer that is computed from `q - k`,
      such as `table[h, k - q + Nq - 1]`, or looked up by it, such as `table[h, bucket[q - k + Nk - 1]]`, or looked up
      by `[q, k]` in a matrix that is constant along its diagonals. The buckets are computed here, once;

    A tensor indexed by b or h may have entries for more batch elements or heads than the attention has. A result that
    is kept for several calls follows in-place changes of its tensors, such as training steps.

    Anything else becomes `scores.function(score_mod)`, which documents the functions that kernels take; they raise
    ValueError for others. For example, `slopes[h] * (k - q)` stays a function, because it is ALiBi only under a causal
    mask; `interop.flex_attention` knows the mask and recognises it. `torch.where(condition, score, -inf)` stays a
    function, and its dead scores are computed; make the condition a mask instead. Learned tensors that a function
    captures receive their gradients.
    """
    return changes_of(score_mod, (q_len, q_len if k_len is None else k_len), torch.device(device))


def changes_of(
    score_mod: Callable[..., Tensor], lengths: tuple[int, int], device: torch.device, is_causal: Asked | None = None
) -> Scores:
    """`from_score_mod`. If the mask `is_causal`, which is asked only where it matters, ALiBi of the signed distance
    `q + Nk - Nq - k` is recognised, too.

    >>> slopes = torch.ones(2)
    >>> signed = lambda s, b, h, q, k: s - slopes[h] * (q - k)
    >>> changes_of(signed, (64, 64), torch.device("cpu"), lambda: True).kinds
    ('distance',)
    """
    try:
        found = recorded(score_mod, (), device, may_capture_learned=True)
        changes = _recognised(found, lengths, is_causal)
        tensors: Sequence[Tensor] = found.tensors
    except ValueError:
        changes, tensors = None, Captured(score_mod).tensors
    return changes or Scores((_with_learned(score_mod, [x for x in tensors if x.requires_grad]),))


def _with_learned(score_mod: Callable[..., Tensor], learned: Sequence[Tensor]) -> Change:
    """A function that is given the learned tensors that `score_mod` captures, so that they receive gradients."""
    if not learned:
        return scores.function(score_mod)
    places = {id(x): number for number, x in enumerate(learned)}

    def of_given(*arguments: Tensor) -> Tensor:
        with _InPlaceOf(places, arguments[5:]):
            return score_mod(*arguments[:5])

    return scores.function(of_given, *learned)


class _InPlaceOf(TorchFunctionMode):
    def __init__(self, places: Mapping[int, int], given: Sequence[Tensor]) -> None:
        super().__init__()
        self._places, self._given = places, given

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(self._of, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _of(self, x: Any) -> Any:
        number = self._places.get(id(x)) if isinstance(x, Tensor) else None
        return x if number is None else self._given[number]


def _recognised(found: Recorded, lengths: tuple[int, int], is_causal: Asked | None) -> Scores | None:
    nodes, at, made = found.expression.nodes, found.output, Scores(())
    while nodes[at].op in ("add", "sub"):
        left, right = nodes[at].inputs
        sign = -1.0 if nodes[at].op == "sub" else 1.0
        if sign > 0 and _SCORE not in found.expression.reads(left):
            left, right = right, left
        if _SCORE in found.expression.reads(right):
            return None
        term = _term(found, right, sign, lengths, is_causal)
        if term is None or term.kind in made.kinds:
            return None
        made, at = made + term, left
    capped = _capped(nodes, at)
    if capped is not None:
        cap, at = capped
        made = made + scores.softcap(cap)
    divided = _temperature(found, at, lengths)
    if divided is not None:
        return made + divided
    return made if at == _SCORE and made.changes else None


def _term(found: Recorded, at: int, sign: float, lengths: tuple[int, int], is_causal: Asked | None) -> Change | None:
    factor, others = _factors(found.expression.nodes, at)
    if len(others) == 2:
        return _decay(found, sign * factor, others, lengths, is_causal)
    if len(others) != 1 or abs(factor) != 1.0:
        return None
    return _bias(found, others[0], sign * factor, lengths) or _relative(found, others[0], sign * factor, lengths)


def _factors(nodes: Sequence[Node], at: int) -> tuple[float, list[int]]:
    number, others, rest = 1.0, list[int](), [at]
    while rest and len(others) < 3:
        node = nodes[each := rest.pop()]
        if node.op == "number":
            number *= float(node.value)
        elif node.op in ("mul", "neg", "to_float"):
            number = -number if node.op == "neg" else number
            rest += node.inputs
        else:
            others.append(each)
    return number, others


def _decay(
    found: Recorded, factor: float, others: Sequence[int], lengths: tuple[int, int], is_causal: Asked | None
) -> Change | None:
    nodes = found.expression.nodes
    for one, other in (others, others[::-1]):
        if _entry(nodes, one) == "h":
            decay, under = scores.alibi, is_causal
            if nodes[other].op == "log1p":
                # A signed distance may be negative at dead scores, and its logarithm NaN.
                other, decay, under = _as_integer(nodes, nodes[other].inputs[0]), scores.log_decay, None
            if sign := _distance(found, other, lengths, under):
                times = partial(operator.mul, -sign * factor)
                return Indexed.of_captured(found.tensors[int(nodes[one].value)], times, decay, "h")
    return None


def _distance(found: Recorded, at: int, lengths: tuple[int, int], is_causal: Asked | None) -> int:
    """1 if a node is the distance of key and query, aligned at the bottom right, -1 if it is its negative, 0 otherwise.

    The signed distance is one of them only where no live key is after its query, that is under a causal mask.
    """
    node, shift = found.expression.nodes[at], lengths[1] - lengths[0]
    is_absolute = node.op == "abs"
    known = affine(found, node.inputs[0] if is_absolute else at, lengths)
    sign = 1 if known == (1, -1, shift) else -1 if known == (-1, 1, -shift) else 0
    if is_absolute:
        return abs(sign)
    return sign if sign and is_causal is not None and is_causal() else 0


def _as_integer(nodes: Sequence[Node], at: int) -> int:
    return nodes[at].inputs[0] if nodes[at].op == "to_float" else at


def _relative(found: Recorded, at: int, sign: float, lengths: tuple[int, int]) -> Change | None:
    nodes = found.expression.nodes
    node = nodes[at]
    heads = [dim for dim, each in enumerate(node.inputs) if nodes[each].op == "h"]
    if node.op != "load" or node.kind != "float" or len(node.inputs) != 2 or len(heads) != 1 or 0 in lengths:
        return None
    buckets = by_distance(found, node.inputs[1 - heads[0]], lengths)
    if buckets is None:
        return None
    table, entries = found.tensors[int(node.value)], 1 - heads[0]
    buckets = torch.where(buckets < 0, buckets + table.shape[entries], buckets)
    if not 0 <= int(buckets.min()) <= int(buckets.max()) < table.shape[entries]:
        return None
    bucket = _bucket(buckets, lengths)
    return Indexed.of_captured(
        table, lambda x: _signed(x if entries == 1 else x.t(), sign), lambda x: scores.relative(x, bucket), "h"
    )  # fmt: skip


def _bucket(buckets: Tensor, lengths: tuple[int, int]) -> Bucket:
    def bucket(offsets: Tensor) -> Tensor:
        # Compiled code cannot look at the first offset.
        is_first = torch.compiler.is_compiling() or int(offsets[0]) == lengths[0] - 1
        if len(offsets) != len(buckets) or not is_first:
            raise ValueError(
                f"what from_score_mod returned must be used with the lengths that it got, {lengths[0]} queries and "
                f"{lengths[1]} keys; got others."
            )
        return buckets.to(offsets.device)

    return bucket


def _bias(found: Recorded, at: int, sign: float, lengths: tuple[int, int]) -> Change | None:
    places = _entry(found.expression.nodes, at)
    x = None if not places else _of_lengths(found, at, places, lengths)
    if x is None:
        return None
    of_keys = "k" in places and "q" not in places
    order, make = ("bhk", scores.key_bias) if of_keys else ("bhqk", scores.bias)
    return Indexed.of_captured(x, lambda x: _signed(_in_order(x, places, order), sign), make, _read(places))


def _signed(x: Tensor, sign: float) -> Tensor:
    return x if sign > 0 else -x  # no copy at each call: a bias may have an entry for each score


def _temperature(found: Recorded, at: int, lengths: tuple[int, int]) -> Change | None:
    node = found.expression.nodes[at]
    if node.op != "div" or node.inputs[0] != _SCORE:
        return None
    places = _entry(found.expression.nodes, node.inputs[1])
    x = None if not places or "k" in places else _of_lengths(found, node.inputs[1], places, lengths)
    if x is None:
        return None
    return Indexed.of_captured(x, lambda x: _in_order(x, places, "bhq"), scores.temperature, _read(places))


def _entry(nodes: Sequence[Node], at: int) -> str:
    """The places at which a tensor is read, if each of its dimensions has a different one."""
    node = nodes[at]
    if node.op != "load" or node.kind != "float":
        return ""
    places = [nodes[each].op for each in node.inputs]
    return "".join(places) if len(set(places)) == len(places) and set(places) <= set("bhqk") else ""


def _read(places: str) -> str:
    """`Indexed.places` of a tensor `[B or 1, Hq or 1, ...]`: "b", "h", or "-" for a dimension that is not indexed."""
    return "".join(place if place in places else "-" for place in "bh")


def _of_lengths(found: Recorded, at: int, places: str, lengths: tuple[int, int]) -> Tensor | None:
    """The tensor that is read at these places; None if it is longer than the attention's queries or keys."""
    x, sizes = found.tensors[int(found.expression.nodes[at].value)], dict(zip("qk", lengths))
    fits = all(x.shape[dim] == sizes[place] for dim, place in enumerate(places) if place in sizes)
    return x if fits else None


def _in_order(x: Tensor, places: str, order: str) -> Tensor:
    """The tensor with dimensions in this order, of size 1 where not indexed."""
    x = x.permute([places.index(place) for place in order if place in places])
    return x[tuple(slice(None) if place in places else None for place in order)]


def _capped(nodes: Sequence[Node], at: int) -> tuple[float, int] | None:
    """The cap of `cap * tanh(x / cap)`, also written with its inverse, and x."""
    if nodes[at].op != "mul":
        return None
    numbers = [nodes[each] for each in nodes[at].inputs if nodes[each].op == "number"]
    curves = [nodes[each] for each in nodes[at].inputs if nodes[each].op == "tanh"]
    if len(numbers) != 1 or len(curves) != 1:
        return None
    cap, inside = float(numbers[0].value), nodes[curves[0].inputs[0]]
    if not cap > 0 or inside.op not in ("div", "mul"):
        return None
    x, by = inside.inputs
    if inside.op == "mul" and nodes[x].op == "number":
        x, by = by, x
    wanted = cap if inside.op == "div" else 1.0 / cap
    return (cap, x) if nodes[by].op == "number" and nodes[by].value == wanted else None
