"""Guards the numbers that a rule reads where torch.compile makes its mask a constant.

Dynamo traces one call of the rule, whose result is discarded. So Dynamo guards the numbers that the rule reads, as in
any traced code, and recompiles when a number changes. It does not guard the contents of tensors, and may make numbers
symbolic; the graph of that call shows both.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor

_numbers = itertools.count(1)
Trace = tuple[int, tuple[str, ...]]


def _output() -> Any:
    """The output graph that Dynamo is tracing into; None if the code runs eagerly after a graph break."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output
    except AttributeError:
        return None


def begin_trace() -> Trace:
    """Records the graph's nodes before rules are called. Marked as constant, so Dynamo calls it at compile time."""
    output = _output()
    if output is None:
        return 0, ()
    number = vars(output).setdefault("_sparseflash_number", next(_numbers))
    return number, tuple(node.name for node in output.current_tracer.graph.nodes)


def call_rules(arity: int, *rules: Any) -> None:
    """Traced by Dynamo."""
    for rule in rules:
        if callable(rule):
            answer = rule(*[torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(arity)])
            if isinstance(answer, Tensor):
                answer.logical_not()  # an operation on a tensor that the rule returns unchanged, so that it is read


def guard_reads(begun: Trace, name: str) -> None:
    """Guards the numbers that rules called since `begin_trace` read. Called at compile time, before the rules' unused
    operations are removed from the graph.

    Raises TypeError if a rule read tensors, or was not traced in one piece. name: the builder of the mask, for errors.
    """
    output = _output()
    number, before = begun
    if output is None:
        return
    if vars(output).get("_sparseflash_number") != number:
        raise TypeError(
            f"{name} must be given rules that torch.compile can trace; got a rule that it cannot trace, for example "
            "because of int(), .item() or if on a number. Build the mask outside and pass it to the compiled function."
        )
    known = set(before)
    nodes = output.current_tracer.graph.nodes
    made = [node for node in nodes if node.name not in known and node.op not in ("placeholder", "get_attr")]
    for each in {each: None for node in made for each in node.all_input_nodes if each not in made}:
        value = each.meta.get("example_value")
        if isinstance(value, SymInt):
            operator.index(value)
        elif isinstance(value, SymFloat):
            float(value)
        elif isinstance(value, Tensor) or each.op == "get_attr":
            raise TypeError(
                f"{name} must be given rules that read no tensors in code compiled by torch.compile, where the mask is "
                f"a constant and would not follow the tensors; got a rule that reads {_called(each)}. Build the "
                "mask outside and pass it to the compiled function."
            )


def _called(node: Any) -> str:
    name = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", node.name)
    return str(name() if callable(name) else name)


def constant(function: Callable[..., Any]) -> None:
    """Marks a function like `torch.compiler.assume_constant_result`, whose import takes a second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


constant(begin_trace)
