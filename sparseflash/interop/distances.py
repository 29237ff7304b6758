"""Integers of a recorded function of scores that are functions of the distance of query and key alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparseflash.scores.expression import INTEGERS, Node
from sparseflash.scores.tracing import Recorded

Affine = tuple[int, int, int]

_EXACT = 2**24  # integers up to it are the same in fp32
_LIMITS = {op: torch.iinfo(dtype).max for op, dtype in INTEGERS.items()}
_CPU = torch.device("cpu")


def affine(found: Recorded, at: int, lengths: tuple[int, int]) -> Affine | None:
    """`(a, b, c)` of a node that equals `a * q + b * k + c` exactly for all positions; otherwise None."""
    return _affines(found, at, lengths)[at]


def by_distance(found: Recorded, at: int, lengths: tuple[int, int]) -> Tensor | None:
    """The integers of a node for each distance q - k, `1 - Nk` to `Nq - 1`, int64; None if they are no function of it,
    or lie outside the tensor that they index.

    Positions may enter only as a difference, or as the row and the column of a matrix that is constant along its
    diagonals. Tensors with dimensions are read now; tensors without are numbers that may change.
    """
    q_len, k_len = lengths
    nodes, sums = found.expression.nodes, _affines(found, at, lengths)
    follows: dict[int, bool] = {}
    for number, known in sums.items():
        node = nodes[number]
        if known is not None:
            follows[number] = known[0] + known[1] == 0
        elif node.op == "number":
            follows[number] = True
        else:
            of_these = bool(node.inputs) and all(follows[each] for each in node.inputs)
            follows[number] = of_these or (node.op == "load" and _is_constant_along_diagonals(found, node, lengths))
    if not follows[at]:
        return None
    distances = torch.arange(1 - k_len, q_len, device=_CPU)
    none = torch.zeros((), dtype=torch.int64, device=_CPU)
    score = torch.zeros((), dtype=torch.float32, device=_CPU)
    read = {int(nodes[number].value) for number in sums if nodes[number].op == "load"}
    tensors = [x.detach().to(_CPU) if number in read else x for number, x in enumerate(found.tensors)]
    places = score, none, none, distances.clamp(min=0), (-distances).clamp(min=0)
    try:
        (values,) = found.expression.evaluated([at], places, tensors)
    except IndexError:
        return None
    return values.expand(len(distances))


def _affines(found: Recorded, at: int, lengths: tuple[int, int]) -> dict[int, Affine | None]:
    made: dict[int, Affine | None] = {}
    for number in sorted(found.expression.reads(at)):
        node = found.expression.nodes[number]
        a = _sum(node, [made[each] for each in node.inputs])
        limit = _EXACT if node.kind == "float" else _LIMITS.get(node.op)
        if a is not None and limit is not None:
            most = abs(a[0]) * lengths[0] + abs(a[1]) * lengths[1] + abs(a[2])
            a = a if most <= limit else None
        made[number] = a
    return made


def _sum(node: Node, inputs: Sequence[Affine | None]) -> Affine | None:
    if node.op in ("q", "k"):
        return (1, 0, 0) if node.op == "q" else (0, 1, 0)
    if node.op == "number":
        return (0, 0, int(node.value)) if float(node.value).is_integer() else None
    known = [each for each in inputs if each is not None]
    if not known or len(known) < len(inputs):
        return None
    first, last = known[0], known[-1]
    if node.op in ("to_float", "to_int", "detach", *_LIMITS):
        return first
    if node.op == "neg":
        return _scaled(first, -1)
    if node.op in ("add", "sub"):
        last = last if node.op == "add" else _scaled(last, -1)
        return first[0] + last[0], first[1] + last[1], first[2] + last[2]
    if node.op == "mul" and (first[:2] == (0, 0) or last[:2] == (0, 0)):
        return _scaled(last, first[2]) if first[:2] == (0, 0) else _scaled(first, last[2])
    return None


def _scaled(x: Affine, factor: int) -> Affine:
    return factor * x[0], factor * x[1], factor * x[2]


def _is_constant_along_diagonals(found: Recorded, node: Node, lengths: tuple[int, int]) -> bool:
    places = [found.expression.nodes[each].op for each in node.inputs]
    x = found.tensors[int(node.value)]
    if sorted(places) != ["k", "q"]:
        return False
    x = (x if places[0] == "q" else x.t())[: lengths[0], : lengths[1]]
    return tuple(x.shape) == lengths and bool((x[1:, 1:] == x[:-1, :-1]).all())
