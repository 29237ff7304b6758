"""FlexAttention's `score_mod`: changes of scores, as the closed family where they are recognised."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparseflash import scores
from sparseflash.scores.change import Scores
from sparseflash.scores.expression import Node
from sparseflash.scores.tracing import Recorded, recorded

_CPU = torch.device("cpu")


def from_score_mod(
    score_mod: Callable[..., Tensor], q_len: int, k_len: int | None = None, *, device: torch.device | str = _CPU
) -> Scores:
    """The changes of scores that a `score_mod(score, b, h, q_idx, kv_idx)` of FlexAttention makes.

    >>> slopes, bias = torch.tensor([0.5, 0.25]), torch.randn(2, 64, 64)
    >>> from_score_mod(lambda s, b, h, q, k: s - slopes[h] * (q - k).abs() + bias[h, q, k], 64).kinds
    ('distance', 'bias')
    >>> from_score_mod(lambda s, b, h, q, k: 20 * torch.tanh(s / 20), 64).kinds
    ('softcap',)
    >>> from_score_mod(lambda s, b, h, q, k: torch.where(q % 2 == 0, s, 2 * s), 64).kinds
    ('function',)

    q_len, k_len: the attention's; k_len is q_len by default. device: of the tensors that it reads.

    Recognised by its operations are `cap * tanh(score / cap)`, and on top of it or of the score itself sums with
    `slopes[h] * (q - k).abs()` (if both lengths are equal) and with entries of tensors at different ones of b, h, q and
    k, in any order: `softcap`, `alibi`, `bias` and `key_bias`. Tensors that are read there may be learned. Anything
    else becomes `scores.function(score_mod)`, which says what the kernels take of it. Raises ValueError for a
    `score_mod` that cannot be recorded, or captures a learned tensor without being recognised.
    """
    found = recorded(score_mod, (), torch.device(device), may_capture_learned=True)
    changes = _recognised(found, q_len, q_len if k_len is None else k_len)
    if changes is not None:
        return changes
    if any(x.requires_grad for x in found.tensors):
        raise ValueError(
            "score_mod must not capture tensors that require gradients unless it is recognised as softcap, alibi or "
            "bias; pass them after it: scores.function(score_mod, x)."
        )
    return Scores((scores.function(score_mod),))


def _recognised(found: Recorded, q_len: int, k_len: int) -> Scores | None:
    nodes, at, made = found.expression.nodes, found.output, Scores(())
    while nodes[at].op in ("add", "sub"):
        left, right = nodes[at].inputs
        sign = -1.0 if nodes[at].op == "sub" else 1.0
        if sign > 0 and 0 not in found.expression.reads(left):
            left, right = right, left
        if 0 in found.expression.reads(right):  # node 0 is the score
            return None
        term = _term(found, right, sign, square=q_len == k_len, lengths={"q": q_len, "k": k_len})
        if term is None or set(term.kinds) & set(made.kinds):
            return None
        made, at = made + term, left
    cap = _cap(nodes, at)
    if cap is not None:
        return made + scores.softcap(cap)
    return made if at == 0 and made.changes else None


def _term(found: Recorded, at: int, sign: float, *, square: bool, lengths: dict[str, int]) -> Scores | None:
    """What is added to the score, if it is a bias or ALiBi."""
    nodes = found.expression.nodes
    node = nodes[at]
    if node.op == "mul" and square:
        for one, other in (node.inputs, node.inputs[::-1]):
            slope = _entry(nodes, one)
            if slope == "h" and _is_distance(nodes, other):
                return Scores((scores.alibi(-sign * found.tensors[int(nodes[one].value)]),))
        return None
    places = _entry(nodes, at)
    if not places:
        return None
    x = found.tensors[int(node.value)]
    if any(x.shape[dim] != lengths[place] for dim, place in enumerate(places) if place in lengths):
        return None
    x = sign * x.permute([places.index(place) for place in "bhqk" if place in places])
    x = x[tuple(slice(None) if place in places else None for place in "bhqk")]
    return Scores(
        (scores.bias(x) if "q" in places else scores.key_bias(x[:, :, 0]) if "k" in places else scores.bias(x),)
    )


def _entry(nodes: list[Node], at: int) -> str:
    """The places at which a tensor is read, if each of its dimensions has one of its own."""
    node = nodes[at]
    if node.op != "load" or node.kind != "float":
        return ""
    places = [nodes[each].op for each in node.inputs]
    return "".join(places) if len(set(places)) == len(places) and set(places) <= set("bhqk") else ""


def _is_distance(nodes: list[Node], at: int) -> bool:
    node, found = nodes[at], set()
    while node.op in ("to_float", "abs"):
        found.add(node.op)
        node = nodes[node.inputs[0]]
    return "abs" in found and node.op == "sub" and sorted(nodes[each].op for each in node.inputs) == ["k", "q"]


def _cap(nodes: list[Node], at: int) -> float | None:
    """The cap of `cap * tanh(score / cap)`."""
    if nodes[at].op != "mul":
        return None
    numbers = [nodes[each] for each in nodes[at].inputs if nodes[each].op == "number"]
    curves = [nodes[each] for each in nodes[at].inputs if nodes[each].op == "tanh"]
    if len(numbers) != 1 or len(curves) != 1:
        return None
    cap, inside = float(numbers[0].value), nodes[curves[0].inputs[0]]
    if inside.op != "div" or inside.inputs[0] != 0 or nodes[inside.inputs[1]].op != "number":
        return None
    return cap if cap > 0 and nodes[inside.inputs[1]].value == cap else None
