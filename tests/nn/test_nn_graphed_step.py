"""`GraphedStep` on a CPU, with a graph that calls the step again and leaves the host's numbers; and on a GPU."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sparseflash import masks, nn
from sparseflash.nn import graphed_step, kv_cache
from sparseflash.nn.kv_cache import length_on_host


def layers_of(count=2, **options):
    torch.manual_seed(0)
    return [nn.SparseSelfAttention(32, 2, masks.causal, rotary=nn.Rotary(16), **options).eval() for _ in range(count)]


class Model:
    def __init__(self, capacity=40, **options):
        self.layers = layers_of(**options)
        self.caches = [layer.new_cache(2, capacity) for layer in self.layers]
        self.fails = False

    def __call__(self, x):
        for layer, cache in zip(self.layers, self.caches):
            x = x + layer(x, cache=cache)
        if self.fails:
            raise torch.OutOfMemoryError
        return {"all": x, "sums": (x.sum(1), x.mean(1))}

    def tensors(self):
        return [x for cache in self.caches for x in (cache.k, cache.v, cache.lengths)]

    @property
    def lengths(self):
        return [cache.length for cache in self.caches]


@contextmanager
def recording(model):
    """Graphs of the CPU: a capture leaves no trace on the device, and a replay none on the host."""

    class Graph:
        replays, is_interrupted = 0, False

        def replay(self):
            lengths = model.lengths
            made = step.step(*step._inputs)
            torch.utils._pytree.tree_map(torch.Tensor.copy_, step._outputs, made)
            for cache, length in zip(model.caches, lengths):
                cache._length = length
            Graph.replays += 1
            if self.is_interrupted:
                raise KeyboardInterrupt

    @contextmanager
    def graph(made, stream):
        kept = [x.clone() for x in model.tensors()]
        try:
            yield
        finally:
            for x, was in zip(model.tensors(), kept):
                x.copy_(was)

    stream = SimpleNamespace(wait_stream=lambda other: None)
    step = nn.GraphedStep(model, model.caches)
    step.records = True
    cuda = SimpleNamespace(
        CUDAGraph=Graph, graph=graph, Stream=lambda: stream, current_stream=lambda: stream,
        stream=lambda stream: nullcontext(), device=lambda device: nullcontext(), set_stream=lambda stream: None,
    )  # fmt: skip
    with mock.patch.object(graphed_step.torch, "cuda", cuda), torch.inference_mode():
        yield step, Graph


def test_a_replayed_step_is_the_step_and_counts_its_tokens():
    model, eager, x = Model(), Model(), torch.randn(2, 30, 32)
    with recording(model) as (step, graph):
        for each in (model, eager):
            each(x[:, :7])
        kept = []
        for place in (*range(7, 20), *range(12, 25)):
            if place == 12:
                for cache in (*model.caches, *eager.caches):
                    cache.truncate(12)
            found, want = step(x[:, place : place + 1]), eager(x[:, place : place + 1])
            assert torch.equal(found["all"], want["all"]) and torch.equal(found["sums"][1], want["sums"][1])
            assert model.lengths == eager.lengths == [place + 1] * 2
            assert all(map(torch.equal, model.tensors(), eager.tensors()))
            kept.append((found["all"], want["all"]))
        assert graph.replays == len(kept) and all(torch.equal(*pair) for pair in kept)  # no result is overwritten


def test_a_step_of_several_tokens_counts_them_all():
    model, x = Model(), torch.randn(2, 30, 32)
    with recording(model) as (step, _):
        for start in range(0, 30, 3):
            step(x[:, start : start + 3])
        assert model.lengths == [30, 30] and model.caches[0].lengths.tolist() == [30, 30]


def test_a_step_beyond_the_capacity_writes_nothing():
    model, x = Model(capacity=9), torch.randn(2, 1, 32)
    with recording(model) as (step, graph):
        for _ in range(9):
            step(x)
        before = [each.clone() for each in model.tensors()]
        with pytest.raises(ValueError, match="at least 10 tokens for 1 more; the cache has room for 9"):
            step(x)
        assert graph.replays == 9 and all(map(torch.equal, model.tensors(), before)) and model.lengths == [9, 9]
        model.caches[0].truncate(5)  # the second cache is still full
        with pytest.raises(ValueError, match="capacity must be at least 10 tokens for 1 more"):
            step(x)
        assert graph.replays == 9 and model.lengths == [5, 9]


@pytest.mark.parametrize("records", [True, False])
def test_a_failed_call_leaves_all_caches_as_they_were(records):
    model, x = Model(), torch.randn(2, 1, 32)
    with recording(model) as (step, _):
        step.records, model.fails = records, True
        with pytest.raises(torch.OutOfMemoryError):
            step(x)
        assert model.lengths == [0, 0] and model.caches[0].lengths.tolist() == [0, 0]
        model.fails = False
        step(x)
        assert model.lengths == [1, 1] and model.caches[0].lengths.tolist() == [1, 1]


def test_an_interrupted_replay_leaves_all_caches_as_they_were():
    """Its tokens are on the device, and not counted on the host."""
    model, x = Model(), torch.randn(2, 1, 32)
    with recording(model) as (step, graph):
        step(x)
        graph.is_interrupted = True
        with pytest.raises(KeyboardInterrupt):
            step(x)
        assert model.lengths == [1, 1] and [cache.lengths.tolist() for cache in model.caches] == [[1, 1], [1, 1]]


def test_a_step_that_shortens_a_cache_and_fails_raises_its_own_error():
    model, x = Model(), torch.randn(2, 1, 32)

    def shortens(x):
        model(x)
        model.caches[0].clear()
        raise torch.OutOfMemoryError

    with torch.no_grad():
        model(x)
        with pytest.raises(torch.OutOfMemoryError):
            nn.GraphedStep(shortens, model.caches)(x)
    assert model.lengths == [1, 1] and model.caches[0].lengths.tolist() == [1, 1]


def test_weights_are_cast_in_every_recorded_call():
    """Autocast keeps casts until it ends, so a replayed step would read memory that has been freed."""
    model, x, kept = Model(), torch.randn(2, 1, 32), []
    with recording(model) as (step, _), torch.autocast("cpu", torch.bfloat16):
        step.step = lambda x: (kept.append(torch.is_autocast_cache_enabled()), model(x))[1]
        step(x)
        assert kept == [False] * 4 + [True]  # the replay of a real graph calls nothing
        assert torch.is_autocast_cache_enabled()
        model.fails, step._graph = True, None
        with pytest.raises(torch.OutOfMemoryError):
            step(x)
        assert torch.is_autocast_cache_enabled()


def test_other_inputs_than_the_first_ones_are_refused():
    model, x = Model(), torch.randn(2, 1, 32)
    with recording(model) as (step, _):
        for wrong, got in ((x.to("meta"), "a tensor on meta"), (3, "int")):
            with pytest.raises(TypeError, match=f"inputs must be tensors on the caches' device cpu; got {got}"):
                step(wrong)
        step(x)
        for wrong in ((x[:, :0],), (x.double(),), (x, x), ()):
            with pytest.raises(ValueError, match="inputs must have the shapes and dtypes of the first call"):
                step(*wrong)
        assert model.lengths == [1, 1]


def test_what_is_no_cache_is_refused():
    layer = layers_of(1)[0]
    cache = layer.new_cache(1, 8)
    for wrong in ([], [cache, None], [layer]):
        with pytest.raises(TypeError, match="caches must be the caches of the layers that step calls; got"):
            nn.GraphedStep(layer, wrong)
    with pytest.raises(ValueError, match="caches must be given once each; got one of them twice"):
        nn.GraphedStep(layer, [cache, cache])
    with pytest.raises(ValueError, match="caches must be on one device; got cpu, meta"):
        nn.GraphedStep(layer, [cache, nn.KVCache(1, 2, 8, 16, device="meta")])
    assert nn.GraphedStep(layer, cache).caches == (cache,) and not nn.GraphedStep(layer, cache).records


def test_a_call_whose_launches_depend_on_the_length_is_not_recorded():
    cache = layers_of(1)[0].new_cache(1, 8)
    words = "a CUDA graph can record a call with a cache only for few new tokens"
    assert length_on_host(cache) == 0
    with mock.patch.object(kv_cache, "is_capturing", lambda device: True), pytest.raises(ValueError, match=words):
        length_on_host(cache)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_replays_the_bits_of_called_steps(dtype, tokens):
    found = []
    x = torch.randn(2, 400, 32, generator=torch.Generator().manual_seed(1)).to("cuda", dtype)
    for records in (False, True):
        model = Model(capacity=400, device="cuda", dtype=dtype)
        step = nn.GraphedStep(model, model.caches) if records else model
        outs = []
        with torch.inference_mode():
            model(x[:, :70])
            for start in (*range(70, 370, tokens), *range(100, 400, tokens)):
                if start == 100:
                    for cache in model.caches:
                        cache.truncate(100)
                outs.append(step(x[:, start : start + tokens].contiguous())["all"])
            assert model.caches[1].lengths.tolist() == [400] * 2 == [model.caches[1].length] * 2
            with pytest.raises(ValueError, match="the cache has room for 400"):
                step(x[:, :tokens])
            assert model.lengths == [400] * 2
        found.append(torch.stack(outs))
    assert torch.equal(*found)


@pytest.mark.gpu
def test_a_gpu_refuses_to_record_a_prompt():
    model = Model(device="cuda")
    step = nn.GraphedStep(model, model.caches)
    with pytest.raises(ValueError, match="a CUDA graph can record a call with a cache only for few new tokens"):
        step(torch.randn(2, 20, 32, device="cuda"))
    assert model.lengths == [0, 0] and model.caches[0].lengths.tolist() == [0, 0]
    with torch.no_grad():
        model(torch.randn(2, 20, 32, device="cuda"))
    step(torch.randn(2, 1, 32, device="cuda"))
    assert model.lengths == [21, 21] and model.caches[0].lengths.tolist() == [21, 21]


@pytest.mark.gpu
def test_a_gpu_reads_the_weights_of_now_under_autocast_and_after_it():
    model, other, x = Model(device="cuda"), Model(device="cuda"), torch.randn(2, 9, 32, device="cuda")
    step = nn.GraphedStep(model, model.caches)
    with torch.no_grad():
        for place in range(9):
            token = x[:, place : place + 1].contiguous()
            with torch.autocast("cuda", torch.bfloat16):
                assert torch.equal(step(token)["all"], other(token)["all"]), place
            for layer in (*model.layers, *other.layers):  # between calls, and where the casts of before are freed
                layer.out.weight.mul_(1.1)
            torch.empty(1 << 24, device="cuda").fill_(torch.nan)
