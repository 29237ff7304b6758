"""One token after a cache: the step has no number of the host, waits for nothing, and is replayed."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from sparseflash import nn
from sparseflash.nn.kv_cache import count
from tests.selection.layers import KINDS, example_of, latent_layer, sequence
from tests.watched.waiting import NoWaiting, waiting_raises

KINDS = [*KINDS, "latent"]


def layer_of(kind):
    if kind == "latent":
        return latent_layer().eval()
    return example_of(kind, rotary=nn.Rotary(16), qk_norm=True).eval()


def tensors_of(cache):
    return {"k": cache.k, "v": cache.v, "lengths": cache.lengths} | getattr(cache, "more", {})


def traced(layer, cache, x):
    """The operations of one step, of which every tensor of the cache is an input."""
    names, length = list(tensors_of(cache)), cache.length

    def step(x, *tensors):
        given = tensors_of(cache)
        put(cache, dict(zip(names, tensors)))
        try:
            return layer(x, cache=cache)
        finally:
            put(cache, given)

    graph = make_fx(step)(x, *tensors_of(cache).values())
    cache.truncate(length)
    return lambda x: graph(x, *tensors_of(cache).values())


def put(cache, tensors):
    for name, x in tensors.items():
        if name in ("k", "v", "lengths"):
            setattr(cache, name, x)
        else:
            cache.more[name] = x


@pytest.mark.parametrize("start", [0, 47])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_operations_of_one_step_are_those_of_every_later_one(kind, start):
    layer, x = layer_of(kind), sequence(100, 1, batch=2)
    caches = [layer.new_cache(2, 107) for _ in range(2)]
    for cache in caches:
        if start:
            layer(x[:, :start], cache=cache)
    step = traced(layer, caches[0], x[:, :1])
    for stop, back in ((start + 20, start + 3), (100, 33), (70, None)):
        for place in range(caches[0].length, stop):
            found, want = step(x[:, place : place + 1]), layer(x[:, place : place + 1], cache=caches[1])
            count(caches[0], 1)  # as `GraphedStep` does
            assert torch.equal(found, want), place
            assert caches[0].lengths.tolist() == caches[1].lengths.tolist() == [place + 1] * 2
        for cache in caches if back else ():
            cache.truncate(back)
    for cache in caches:
        cache.clear()
    assert torch.equal(step(x[:, :1]), layer(x[:, :1], cache=caches[1]))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_step_does_not_wait_for_the_device(kind):
    layer, x = layer_of(kind), sequence(40, 1, batch=2)
    cache = layer.new_cache(2, 60)
    layer(x[:, :-1], cache=cache)
    with NoWaiting():
        layer(x[:, -1:], cache=cache)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("start", [0, 2100])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_replays_the_bits_of_called_steps(kind, start, dtype):
    """Also where the choice is shared by many programs."""
    layer, x = layer_of(kind).to("cuda", dtype), sequence(start + 150, 1, batch=2).to("cuda", dtype)
    caches = [layer.new_cache(2, start + 150) for _ in range(2)]
    step = nn.GraphedStep(lambda x: layer(x, cache=caches[0]), caches[0])
    with torch.inference_mode():
        for cache in caches if start else ():
            layer(x[:, :start], cache=cache)
        for first in (start, start + 33):
            for place in range(first, start + 150):
                # Of other strides cuBLAS may compute other bits, and a recorded step has a contiguous copy.
                token = x[:, place : place + 1].contiguous()
                assert torch.equal(step(token), layer(token, cache=caches[1])), place
            assert caches[0].length == start + 150 and torch.equal(caches[0].lengths, caches[1].lengths)
            with pytest.raises(ValueError, match="the cache has room for"):
                step(x[:, :1])
            for cache in caches:
                cache.truncate(start + 33)
        with waiting_raises():
            layer(x[:, :1], cache=caches[1])


@pytest.mark.gpu
def test_a_gpu_does_not_record_a_backend_that_does_not_decode():
    layer, x = layer_of("MixtureOfBlocks").float().cuda(), sequence(1, 1).float().cuda()
    layer.backend = "blockwise"
    cache = layer.new_cache(1, 20)
    with pytest.raises(ValueError, match="with a backend that decodes"):
        nn.GraphedStep(lambda x: layer(x, cache=cache), cache)(x)
    assert cache.length == 0 and cache.lengths.tolist() == [0]
