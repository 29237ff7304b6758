"""Guards what a rule reads where torch.compile makes its mask a constant.

Dynamo traces a call of the rule, whose result is not needed: so it guards the numbers that the rule reads, wherever
they are, as it does those of the code beside it, and compiles again when one changes. It does not guard the contents of
tensors, and may leave numbers open; both are seen in the graph of that call.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor

_numbers = itertools.count(1)
Trace = tuple[int, tuple[str, ...]]  # the number of a trace of Dynamo's, and the names of the nodes of its graph


def _output() -> Any:
    """What Dynamo is tracing into; None where code runs after it gave up tracing."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output
    except AttributeError:
        return None


def begin_trace() -> Trace:
    """Notes what is in the graph before rules are called. Marked as constant: called by Dynamo at compile time."""
    output = _output()
    if output is None:
        return 0, ()
    number = vars(output).setdefault("_sparseflash_number", next(_numbers))
    return number, tuple(node.name for node in output.current_tracer.graph.nodes)


def call_rules(arity: int, *rules: Any) -> None:
    """Calls rules of so many numbers. Traced by Dynamo."""
    for rule in rules:
        if callable(rule):
            answer = rule(*[torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(arity)])
            if isinstance(answer, Tensor):
                answer.logical_not()  # a tensor that is answered as it is would be read by no operation


def guard_reads(begun: Trace, name: str) -> None:
    """Guards what the rules called since then read. Called at compile time, while the rules' operations, of which no
    result is needed, are still in the graph.

    Raises TypeError if they read tensors, or were not traced in one piece, with what it would be the mask of.
    """
    output = _output()
    number, before = begun
    if output is None:  # this runs at every call, so nothing becomes stale
        return
    if vars(output).get("_sparseflash_number") != number:
        raise TypeError(
            f"{name} must be given rules that torch.compile can trace, to see what they read; got one that it cannot, "
            "as with int(), .item() or if on a number. Build the mask outside and pass it to the compiled function."
        )
    known = set(before)
    nodes = output.current_tracer.graph.nodes
    made = [node for node in nodes if node.name not in known and node.op not in ("placeholder", "get_attr")]
    for each in {each: None for node in made for each in node.all_input_nodes if each not in made}:
        value = each.meta.get("example_value")
        if isinstance(value, SymInt):
            operator.index(value)  # makes the guard that it is this number
        elif isinstance(value, SymFloat):
            float(value)
        elif isinstance(value, Tensor) or each.op == "get_attr":
            raise TypeError(
                f"{name} must be given rules that read no tensors inside what torch.compile compiles, where the mask "
                f"is a constant that would not follow their contents; got one that reads {_called(each)}. Build the "
                "mask outside and pass it to the compiled function."
            )


def _called(node: Any) -> str:
    """What a tensor is called where it comes from."""
    name = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", node.name)
    return str(name() if callable(name) else name)


def constant(function: Callable[..., Any]) -> None:
    """Marks a function like `torch.compiler.assume_constant_result`, whose import takes a second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


constant(begin_trace)
