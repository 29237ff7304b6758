import dataclasses
import gc
import json
import pickle
import sys
import threading
import weakref
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sparseflash import BlockMask, attention, clear_caches, masks, scores
from sparseflash.backends.triton.schedule.plan import Plan
from sparseflash.blockmask.cache import BoundedDict, is_countable, mask_cache, once
from sparseflash.blockmask.numbering import tile_numbers
from sparseflash.masks.block_index import mask_of_queries
from tests.backends.triton.plans import plan
from tests.processes.forked import interpreting, python

N = 64
BACKENDS = ["blockwise", "triton"]


def tensors(requires_grad=False):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 1, N, 16, generator=generator, requires_grad=requires_grad) for _ in range(3)]


def plans_made():
    return mock.patch.object(Plan, "__init__", autospec=True, side_effect=Plan.__init__)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_kept_with_indices_that_no_mask_owns(backend):
    """Inductor may reuse the memory and the Python object of a tensor that a compiled graph no longer needs."""
    q, k, v = tensors()
    attention(q, k, v, masks.causal(N, block=16), backend=backend)
    few, many = masks.local(N, window=9, block=16), masks.local(N, window=25, block=16)
    buffer = torch.zeros(len(many.indices), dtype=torch.int32)
    for mask in (few, many, few):
        indices = buffer[: len(mask.indices)] if mask is few else buffer
        indices.copy_(mask.indices)
        operator = getattr(torch.ops.sparseflash, backend)
        out, *_ = operator(q, k, v, mask.indptr, indices, mask.tile, mask.words, mask.pattern, None, 16, 16, 16**-0.5)
        torch.testing.assert_close(out, attention(q, k, v, mask, backend="reference"))
        assert mask_cache(indices) == {} and not is_countable(indices)


def test_nothing_is_kept_with_a_mask_that_a_compiled_graph_has_returned():
    """Its memory may be the graph's, and hold another mask after the next call."""

    def chosen(scores):
        return masks.top_k_blocks(scores, k=2, q_len=N, block=16)

    torch.compiler.reset()
    scores = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.compile(chosen, backend="aot_eager", fullgraph=True)(scores)
    assert mask == chosen(scores)
    assert mask_cache(mask.indices) == {}
    q, k, v = tensors()
    out = attention(q, k, v, mask)
    assert mask_cache(mask.indices) == {}
    assert torch.equal(out, attention(q, k, v, chosen(scores)))


def test_a_chosen_mask_may_cross_a_graph_break():
    def step(q, k, v):
        mask = masks.top_k_blocks(q[0, 0, :4, :4], k=2, q_len=N, block=16)
        torch._dynamo.graph_break()
        return attention(q, k, v, mask)

    torch.compiler.reset()
    q, k, v = tensors()
    assert torch.equal(torch.compile(step, backend="aot_eager")(q, k, v), step(q, k, v))


def rebuilt(mask, **changed):
    parts = {each.name: getattr(mask, each.name) for each in dataclasses.fields(mask)}
    return dataclasses.replace(mask, **{**parts, **changed})


@pytest.mark.parametrize("lengths", [None, [40]])
def test_a_mask_rebuilt_of_its_own_fields_keeps_what_is_derived(lengths):
    mask = masks.local(N, window=9, block=16)
    if lengths is not None:
        mask = mask.with_lengths(lengths)
    again = rebuilt(mask)
    assert again == mask and again.indices is mask.indices and again.bits is mask.bits
    q, k, v = tensors()
    with plans_made() as made:
        for each in (mask, again, rebuilt(again)):
            attention(q, k, v, each, backend="triton")
    assert made.call_count == 1


def test_a_mask_rebuilt_of_other_arrays_derives_its_own():
    mask, other = masks.local(N, window=9, block=16), masks.local(N, window=5, block=16)
    mask.columns  # noqa: B018  derived, and kept
    made = rebuilt(mask, bits=other.bits)
    assert made == other
    assert made.indices is not mask.indices and made.words.data_ptr() == other.words.data_ptr()


def test_a_mask_rebuilt_for_other_numbers_of_tokens_derives_its_own():
    mask = masks.local(60, window=9, block=128)
    q, k, v = tensors()
    attention(q[:, :, :60], k[:, :, :60], v[:, :, :60], mask, backend="triton")
    assert 0 < mask.density < 1
    again = dataclasses.replace(rebuilt(mask), q_len=N, k_len=N)
    assert again.indices is not mask.indices and again.density < mask.density
    want = attention(q, k, v, again, backend="reference")
    torch.testing.assert_close(attention(q, k, v, again, backend="triton"), want)


def test_a_mask_made_in_compiled_code_that_outlives_it_is_planned_once():
    kept, made = {}, masks.local(N, window=9, block=16)

    def step(q, k, v):
        if "mask" not in kept:
            kept["mask"] = BlockMask(N, N, 16, 16, made.indptr, made.indices, made.tile, made.bits, made.pattern)
        return attention(q, k, v, kept["mask"], backend="triton")

    torch.compiler.reset()
    compiled = torch.compile(step, backend="aot_eager")
    compiled(*tensors())
    with plans_made() as plans:
        for _ in range(3):
            compiled(*tensors())
        attention(*tensors(), kept["mask"], backend="triton")
    assert plans.call_count <= 1
    assert is_countable(kept["mask"].indices)


def test_lengths_are_pickled_as_they_are_wherever_they_lay():
    mask = masks.local(N, window=9, block=16)
    for length in range(20):
        padded = dataclasses.replace(mask, lengths=torch.tensor([length, 99], dtype=torch.int32)[:1].expand(2, 1))
        assert pickle.loads(pickle.dumps(padded)).lengths.tolist() == [[length]] * 2
        del padded


def test_the_bits_are_stored_once():
    for mask in (masks.local(N, window=9, block=16), masks.dense(N, block=16)):
        assert mask.with_lengths([40]).words is mask.words
        arrays = [getattr(mask, name) for name in ("indptr", "indices", "tile", "bits", "pattern")]
        assert mask.nbytes == sum(x.numel() * 4 for x in arrays)
        if len(mask.bits):
            assert mask.words.data_ptr() == mask.bits.data_ptr() and mask.words.numel() == mask.bits.numel()
        else:  # one dead tile, which keeps torch.compile from specialising to a size of 0
            assert mask.words.numel() == 16 and not mask.words.any()


def test_what_is_kept_is_made_outside_inference_mode():
    with torch.inference_mode():
        made = once({}, "key", lambda: [torch.zeros(1)])
    assert not made[0].is_inference()


def test_what_is_kept_is_made_once():
    kept, made = {}, []
    for _ in range(2):
        assert once(kept, "key", lambda: made.append(None) or [1]) == [1]
    assert len(made) == 1


def test_plans_of_one_mask_may_be_made_by_many_threads():
    mask = masks.local(N, window=9, block=16)
    failures = []

    def work():
        try:
            for batch in range(1, 6):
                plan(mask, batch).worklist(0, 16)
        except Exception as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(4)]
    with mock.patch("sparseflash.backends.triton.schedule.plan._MOST_PLANS", 2):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_a_pickled_mask_keeps_with_indices_of_its_own():
    mask = masks.local(N, window=9, block=16)
    again = pickle.loads(pickle.dumps(mask))
    assert isinstance(again, BlockMask) and is_countable(again.indices)
    assert mask_cache(again.indices) is not mask_cache(mask.indices)


def test_clear_caches_frees_what_nothing_else_holds():
    q, k, v = (x.half() for x in tensors())
    mask = masks.local(N, window=20, block=16)
    for used in (mask, None):
        for _ in range(2):
            attention(q, k, v, used, backend="triton")
    found = [each for each in gc.get_objects() if type(each) is Plan]
    assert len(found) >= 2
    alive = [weakref.ref(each) for each in found]
    del found
    clear_caches()
    gc.collect()
    assert [each() for each in alive] == [None] * len(alive)
    assert not mask_cache(mask.indices)
    want = attention(q, k, v, mask, backend="blockwise")
    torch.testing.assert_close(attention(q, k, v, mask, backend="triton"), want, rtol=1e-2, atol=1e-2)


def test_clear_caches_empties_what_changes_of_scores_keep():
    q, k, v = tensors()
    table = scores.relative(torch.randn(q.shape[1], 9), scores.clipped(4))
    own = scores.function(lambda score, b, h, q, k: score * 0.5)
    attention(q, k, v, scores=table)
    own.recorded(q.device)
    assert len(table._made) == len(own._recorded) == 1
    clear_caches()
    assert len(table._made) == len(own._recorded) == 0
    attention(q, k, v, scores=table + own)


# Prints cached functions and empty containers of modules, in a process that has only imported the library.
CACHES = """
import collections, functools, gc, importlib, json, pkgutil, sys, weakref
import sparseflash
from sparseflash.blockmask import cache
for found in pkgutil.walk_packages(sparseflash.__path__, "sparseflash."):
    try:
        if not found.name.endswith(".__main__"):
            importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        assert not error.name.startswith("sparseflash"), error
functions = [each for each in gc.get_objects() if type(each) is functools._lru_cache_wrapper]
functions = [each for each in functions if each.__module__.startswith("sparseflash")]
cleared = [clear.__self__ for clear in cache._clearings if hasattr(clear, "__self__")]
kinds = dict, list, set, collections.deque
modules = {name: vars(module) for name, module in sys.modules.items() if name.startswith("sparseflash")}
print(json.dumps({
    "bounded": [each.__qualname__ for each in functions if each.cache_parameters()["maxsize"] is not None],
    "unbounded": [each.__qualname__ for each in functions if each.cache_parameters()["maxsize"] is None],
    "cleared": [each.__qualname__ for each in functions if any(each is other for other in cleared)],
    "containers": [
        f"{module}.{name}" for module, names in modules.items() for name, each in names.items()
        if isinstance(each, kinds) and not each and not isinstance(each, cache.BoundedDict) and name[:2] != "__"
    ],
}))
"""


def test_every_cache_of_the_library_is_bounded_and_emptied_by_clear_caches():
    done = python("-c", CACHES, server=interpreting())
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["bounded"] == found["cleared"] and len(found["bounded"]) >= 10
    assert sorted(found["unbounded"]) == ["_libc", "_setter", "cuda_driver"]
    assert found["containers"] == ["sparseflash.blockmask.graph_memory._graphs"]


class Columns(torch.nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, x):
        return x + self.mask.columns[0].sum()


def parts_of_fake_inputs(mask):
    with FakeTensorMode(allow_non_fake_inputs=True):
        mask.columns, tile_numbers(mask)
        masks.top_k_blocks(torch.rand(2, 1, 5, 5), k=2, q_len=70, block=16, causal=True, group=3)
        BlockMask.from_block_index(torch.arange(5).view(1, 1, 5, 1), q_len=70, block=16, causal=True)
        mask_of_queries(torch.zeros(1, 1, 70, 2, dtype=torch.int64), 16, 16, 70, causal=True)


def parts_of_an_export(mask):
    torch.export.export(Columns(mask), (torch.ones(3),), strict=False)


@pytest.mark.parametrize("derive", [parts_of_fake_inputs, parts_of_an_export])
def test_what_is_made_of_fake_tensors_is_not_kept(derive):
    clear_caches()
    mask, same = (masks.causal(70, block=16) for _ in range(2))
    derive(mask)
    for got, want in zip([*mask.columns, *tile_numbers(mask)], [*same.columns, *tile_numbers(same)], strict=True):
        assert type(got) is torch.Tensor and torch.equal(got, want)
    chosen = masks.top_k_blocks(torch.rand(2, 1, 5, 5), k=2, q_len=70, block=16, causal=True, group=3)
    assert chosen.pattern.tolist() == [[0, 0, 0], [1, 1, 1]]
    rows = mask_of_queries(torch.zeros(1, 1, 70, 2, dtype=torch.int64), 16, 16, 70, causal=True)
    assert rows.validate().canonical().density > 0


def test_caches_are_made_while_others_are_cleared():
    stop, made = threading.Event(), []

    def make():
        while not stop.is_set():
            made.append([BoundedDict(1) for _ in range(50)])
            del made[:-4]

    threads = [threading.Thread(target=make) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for _ in range(300):
            clear_caches()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
