"""CUDA streams and graphs: cached tensors may be read on any stream, and by a graph for as long as it lives.

PyTorch orders the work of one stream and leaves the rest to the user, who cannot see cached tensors. So every cache of
tensors keeps a `ReadyEvent` with them and calls its `wait` before each use.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from sparseflash.blockmask import graph_memory


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded on this device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class ReadyEvent:
    """Marks the point at which tensors that the current stream is making will be ready.

    `made`: a tensor, or a tuple, list, dict or dataclass that holds tensors.
    """

    def __init__(self, made: Any) -> None:
        self._tensors = [x for x in tensors_in(made) if x.is_cuda]
        self._streams: set[int] = set()  # that may read the tensors
        if self._tensors:
            self._device = self._tensors[0].device
            self._captured = is_capturing(self._device)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(self._device))
            self._streams.add(_number_of_stream(self._device.index))

    def wait(self) -> None:
        """Must be called before the current stream is given work that reads the tensors."""
        if not self._tensors:
            return
        number = _number_of_stream(self._device.index)
        if is_capturing(self._device):
            if not self._captured:  # tensors made by the graph lie in its own memory pool
                graph_memory.keep_for_graph(number, self._tensors)
            return  # a graph cannot wait for work outside it; ordering its replays is up to the user
        if number in self._streams or self._captured:
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)
        for tensor in self._tensors:
            tensor.record_stream(stream)  # keeps the memory from being reused while this stream reads it
        self._streams.add(number)


def wait_for(first: ReadyEvent, *others: ReadyEvent) -> None:
    """`wait` of each, for tensors on one device: the driver is asked once, not for each."""
    is_ordinary = bool(first._tensors) and not is_capturing(first._device)
    number = _number_of_stream(first._device.index) if is_ordinary else None
    for each in (first, *others):
        if number is None or number not in each._streams:
            each.wait()


def _number_of_stream(device: int) -> int:
    return int(torch._C._cuda_getCurrentRawStream(device))


def tensors_in(made: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, dicts and dataclasses, in order."""
    found, left = [], [made]
    while left:
        x = left.pop()
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (tuple, list)):
            left += x[::-1]
        elif isinstance(x, dict):
            left += reversed(x.values())
        elif is_dataclass(x) and not isinstance(x, type):
            left += [getattr(x, each.name) for each in reversed(fields(x))]
    return found
