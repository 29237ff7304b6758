"""CUDA streams, as far as a machine without a GPU can test them."""

from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from sparseflash import clear_caches, masks
from sparseflash.blockmask import graph_memory, streams
from sparseflash.blockmask.streams import ReadyEvent
from sparseflash.nn.layer_mask import LayerMask
from sparseflash.scaled_dot_product import upper_left
from sparseflash.varlen import varlen_mask


class OnGpu(torch.Tensor):
    """A tensor that claims to lie on a GPU, and notes the streams that it is recorded on."""

    is_cuda = True
    device = torch.device("cuda", 0)

    @staticmethod
    def __new__(cls):
        tensor = torch.zeros(1, device="cpu").as_subclass(cls)
        tensor.recorded = []
        return tensor

    def record_stream(self, stream):
        self.recorded.append(stream.number)


class Stream:
    def __init__(self, number):
        self.number, self.waited, self.kept = number, 0, []

    def wait_event(self, event):
        assert event.record.call_count == 1
        self.waited += 1


@pytest.fixture
def current():
    here = [Stream(0)]
    with (
        mock.patch.object(torch.cuda, "Event", mock.Mock),
        mock.patch.object(torch.cuda, "current_stream", lambda device: here[0]),
        mock.patch.object(streams, "_number_of_stream", lambda device: here[0].number),
        mock.patch.object(streams, "is_capturing", lambda device: here[0].number < 0),
        mock.patch.object(graph_memory, "keep_for_graph", lambda number, tensors: here[0].kept.extend(tensors)),
    ):
        yield here


@dataclass
class Pair:
    first: torch.Tensor
    rest: tuple[torch.Tensor | None, ...]


def test_another_stream_waits_once_and_the_allocator_is_told(current):
    first, second = OnGpu(), OnGpu()
    made = ReadyEvent({"a": Pair(first, (second, None)), "b": [3]})
    made.wait()
    assert current[0].waited == 0 and first.recorded == []
    current[0] = Stream(7)
    for _ in range(3):
        made.wait()
    assert current[0].waited == 1 and first.recorded == second.recorded == [7]
    current[0] = Stream(0)
    made.wait()
    assert current[0].waited == 0


def test_what_a_graph_records_does_not_wait_for_what_is_not_in_it(current):
    tensor = OnGpu()
    made = ReadyEvent(tensor)
    current[0] = Stream(-1)
    made.wait()
    assert current[0].waited == 0 and tensor.recorded == []
    assert current[0].kept == [tensor], "the graph reads it for as long as it lives"


def test_what_a_graph_has_recorded_is_waited_for_in_the_graph_alone(current):
    current[0] = Stream(-1)
    tensor = OnGpu()
    made = ReadyEvent(tensor)
    current[0] = Stream(7)
    made.wait()
    assert current[0].waited == 0 and tensor.recorded == []
    current[0] = Stream(-2)
    made.wait()
    assert current[0].waited == 0 and current[0].kept == [], "it lies in memory of the graph that made it"


def test_on_a_cpu_there_is_nothing_to_wait_for():
    with mock.patch.object(torch.cuda, "Event", side_effect=AssertionError):
        ReadyEvent((torch.zeros(1), None)).wait()


LAYER = LayerMask(masks.causal)
CPU = torch.device("cpu")
KEPT = {
    "of a layer": lambda: LAYER(40, 40, CPU),
    "of packed sequences": lambda: varlen_mask([0, 20, 50], pattern=masks.causal),
    "of is_causal": lambda: upper_left(20, 30, 16, CPU),
}


@pytest.mark.parametrize("mask", KEPT.values(), ids=KEPT)
def test_a_mask_that_is_kept_is_waited_for(mask):
    clear_caches()
    first = mask()
    with mock.patch.object(ReadyEvent, "wait") as waited:
        assert mask() is first
    assert waited.call_count == 1


def test_tensors_are_found_in_order_however_deep():
    @dataclass
    class Pair:
        first: object
        second: object

    a, b, c, d, e = (torch.tensor(n) for n in range(5))
    found = streams.tensors_in((a, [b, {"x": Pair(c, None), "y": (3, d)}], Pair, "text", Pair([e], a)))
    assert [int(x) for x in found] == [0, 1, 2, 3, 4, 0]
    assert streams.tensors_in(None) == [] and streams.tensors_in(a) == [a]
