"""Finds operations that make the host wait for a GPU, also on the CPU, and counts the kernels that a GPU
would start.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING = (
    "_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "nonzero_numpy", "masked_select", "unique_dim",
    "_unique", "_unique2", "unique_consecutive", "bincount", "lift_fresh",
)  # fmt: skip
_STARTING_NOTHING = ("detach", "empty", "new_empty", "empty_like", "_unsafe_view", "promote_types")


class NoWaiting(TorchDispatchMode):
    """Raises at an operation that would make the host wait for a GPU.

    `started` counts the others without views: about the kernels of a GPU.
    """

    def __init__(self):
        super().__init__()
        self.started = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
        waits = (
            name in _WAITING
            or (name.startswith("index") and any(is_bool(i) for i in indices_of(name, args)))
            or (name == "repeat_interleave" and kwargs.get("output_size") is None)
        )
        assert not waits, f"{func} would wait for the device"
        self.started += not (func.is_view or name in _STARTING_NOTHING)
        return func(*args, **kwargs)


def indices_of(name, args):
    return args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()


def is_bool(index):
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


@contextmanager
def waiting_raises() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_replays_as_called(
    step: Callable[[], Sequence[Tensor]], set_inputs: Callable[[Any], object], inputs: Iterable[Any]
) -> None:
    """On a GPU: `step` never waits, and its CUDA graph gives the bits of a call for any inputs.

    `set_inputs` copies one of `inputs` to where `step` reads it.
    """
    for _ in range(2):
        step()
    with waiting_raises():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = [x.detach() for x in step()]  # a kept autograd graph would belong to another stream
    for values in inputs:
        set_inputs(values)
        graph.replay()
        for got, want in zip(recorded, step(), strict=True):
            assert torch.equal(got, want)
