"""What a CUDA graph may record: nothing that is made now and kept, and what it reads is kept."""

import gc
import weakref
from unittest import mock

import pytest
import torch

from dynamic_masks import made_dynamic
from sparseflash import attention, masks
from sparseflash.backends.triton import cuda_graphs
from sparseflash.backends.triton.schedule import plan as planning
from sparseflash.backends.triton.schedule.plan import Plan, dense_plan
from sparseflash.blockmask import streams
from sparseflash.blockmask.cache import mask_cache


def tensors(tokens=20, batch=1, dtype=torch.float16, requires_grad=False):
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(batch, 1, tokens, 16, generator=generator).to(dtype).requires_grad_(requires_grad)
            for _ in range(3)]  # fmt: skip


def recorded():
    """As if a graph were being recorded."""
    return mock.patch.object(streams, "is_capturing", lambda device: True)


@pytest.fixture(autouse=True)
def nothing_recorded():
    with mock.patch.object(cuda_graphs, "_recorded", {}):
        yield


def plans_of(mask):
    return [each for each in mask_cache(mask.indices).values() if isinstance(each, Plan)]


def test_a_cpu_records_nothing():
    assert not streams.is_capturing(torch.device("cpu"))


@pytest.mark.parametrize("masked", [True, False])
def test_what_is_kept_is_not_made_while_a_graph_is_recorded(masked):
    """Its tensors would be filled by the replay only, and other calls would read them before."""
    dense_plan.cache_clear()
    mask = masks.causal(20, block=16) if masked else None
    q, k, v = tensors(requires_grad=True)
    with recorded(), pytest.raises(RuntimeError, match=r"call it once with the same mask .* before the capture"):
        attention(q, k, v, mask, backend="triton")
    out = attention(q, k, v, mask, backend="triton")
    with recorded():
        assert torch.equal(attention(q, k, v, mask, backend="triton"), out)
        with pytest.raises(RuntimeError, match="forward and, if it is recorded, backward"):
            out.sum().backward()
        with pytest.raises(RuntimeError, match="before the capture"):  # another layout
            attention(q.float(), k.float(), v.float(), mask, backend="triton")
    out = attention(q, k, v, mask, backend="triton")
    out.sum().backward()
    with recorded():
        attention(q, k, v, mask, backend="triton").sum().backward()


def test_a_mask_that_the_graph_itself_makes_is_planned_there():
    with recorded():
        dynamic = made_dynamic(masks.causal(20, block=16), 0)
        attention(*tensors(), dynamic, backend="triton")
        attention(*tensors(), dynamic, backend="triton")
        assert len(plans_of(dynamic)) == 1
    assert cuda_graphs._recorded == {}  # its memory is the graph's


def test_nothing_that_a_graph_records_is_kept_with_a_mask_that_was_there_before():
    """It would be empty until the replay, and other calls would read it before."""
    dynamic = made_dynamic(masks.causal(20, block=16), 0)
    q, k, v = tensors(requires_grad=True)
    with recorded():
        attention(q, k, v, dynamic, backend="triton").sum().backward()
    assert plans_of(dynamic) == [] and "columns" not in mask_cache(dynamic.indices)
    attention(*tensors(), dynamic, backend="triton")
    assert len(plans_of(dynamic)) == 1


def test_a_mask_that_a_graph_has_made_keeps_nothing_between_replays():
    """Each replay makes another mask of it."""

    def chosen(seed):
        scores = torch.rand(4, 4, generator=torch.Generator().manual_seed(seed))
        return masks.top_k_blocks(scores, k=2, q_len=60, block=16)

    with recorded():
        mask = chosen(0)
        attention(*tensors(60), mask, backend="triton")
    for replay in (1, 2):
        other = chosen(replay)
        for name in ("indptr", "indices", "tile", "words"):
            getattr(mask, name).copy_(getattr(other, name))
        got, want = (attention(*tensors(60), each, backend="triton") for each in (mask, other))
        assert torch.equal(got, want)


def test_what_was_recorded_outlives_the_mask_and_the_caches():
    dense_plan.cache_clear()
    mask = masks.local(20, window=9, block=16)
    for _ in range(3):  # the third is a repeated call
        attention(*tensors(), mask, backend="triton")
        attention(*tensors(), backend="triton")
    with recorded():
        attention(*tensors(), mask, backend="triton")
        attention(*tensors(), backend="triton")
    assert len(cuda_graphs._recorded) == 2
    work = [weakref.ref(plan.rows(16).work) for plan in cuda_graphs._recorded.values()]
    del mask
    dense_plan.cache_clear()
    gc.collect()
    assert all(each() is not None for each in work)


def test_plans_that_nobody_recorded_are_few():
    mask = masks.causal(3, block=16)
    with mock.patch.object(planning, "_MOST_PLANS", 4):
        for batch in range(1, 7):
            attention(*tensors(3, batch), mask, backend="triton")
    assert [each.rows(16).work.shape[0] for each in plans_of(mask)] == [3, 4, 5, 6]
