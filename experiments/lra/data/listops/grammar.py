"""The ListOps grammar: draw an expression, compute its value, print it as in the Long Range Arena's files.

An expression is a flat list of small integers in reading order, the model's input:

    0..9     the digits
    10..13   [MIN  [MAX  [MED  [SM     (SM: sum modulo 10)
    14       ]

Source of the distribution: `lra_benchmarks/data/listops.py` of google-research/long-range-arena (Nangia and Bowman,
2018, with longer expressions).
"""

from __future__ import annotations

import random

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
MIN, MAX, MED, SM = range(10, 14)
CLOSE = 14
NAMES = (*map(str, range(10)), *OPERATORS, "]")

MAX_DEPTH = 10  # levels, including the root
MAX_ARGS = 10  # arguments of an operator
OPERATOR_CHANCE = 0.25  # at every level, including the root


def draw(rng: random.Random, longer_than: int, shorter_than: int) -> list[int] | None:
    """None if the length (in tokens) is not strictly between the bounds."""
    uniform = rng.random
    tokens: list[int] = []
    missing = [1]
    outstanding = 1
    while missing:
        if missing[-1] == 0:
            missing.pop()
            if missing:
                tokens.append(CLOSE)
            continue
        missing[-1] -= 1
        outstanding -= 1
        if len(missing) == MAX_DEPTH or uniform() > OPERATOR_CHANCE:
            tokens.append(int(10 * uniform()))
            continue
        arguments = 2 + int((MAX_ARGS - 1) * uniform())
        tokens.append(MIN + int(len(OPERATORS) * uniform()))
        missing.append(arguments)
        outstanding += arguments
        if len(tokens) + len(missing) - 1 + outstanding >= shorter_than:
            return None
    return tokens if longer_than < len(tokens) < shorter_than else None


def evaluate(tokens: list[int]) -> int:
    open_lists: list[list[int]] = [[]]
    operators: list[int] = []
    for token in tokens:
        if token < MIN:
            open_lists[-1].append(token)
        elif token != CLOSE:
            operators.append(token)
            open_lists.append([])
        else:
            value = apply(operators.pop(), open_lists.pop())
            open_lists[-1].append(value)
    return open_lists[0][0]


def apply(operator: int, arguments: list[int]) -> int:
    if operator == MIN:
        return min(arguments)
    if operator == MAX:
        return max(arguments)
    if operator == SM:
        return sum(arguments) % 10
    ordered = sorted(arguments)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2


def render(tokens: list[int]) -> str:
    """As in the released files: every operator applied to one argument at a time.

    >>> render([MAX, 3, 4, CLOSE])
    '( ( ( [MAX 3 ) 4 ) ] )'
    """
    parts: list[str] = []
    opened: list[int] = []
    counts: list[int] = []
    for token in tokens:
        if MIN <= token < CLOSE:
            opened.append(len(parts))
            counts.append(0)
            parts.append(NAMES[token])
            continue
        parts.append(NAMES[token])
        if token == CLOSE:
            start, arguments = opened.pop(), counts.pop()
            parts[start] = "( " * (arguments + 1) + parts[start]
            parts.append(")")
        if counts:
            parts.append(")")
            counts[-1] += 1
    return " ".join(parts)
