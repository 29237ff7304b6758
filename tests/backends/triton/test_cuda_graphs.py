from unittest import mock

import pytest
import torch

from sparseflash import attention, clear_caches, masks
from sparseflash.backends.triton.schedule import plan as planning
from sparseflash.blockmask import streams
from sparseflash.blockmask.cache import mask_cache
from tests.backends.triton.plans import plans_of
from tests.drawn.dynamic_masks import made_dynamic


def tensors(tokens=20, batch=1, dtype=torch.float16, requires_grad=False):
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(batch, 1, tokens, 16, generator=generator).to(dtype).requires_grad_(requires_grad)
            for _ in range(3)]  # fmt: skip


def recorded():
    return mock.patch.object(streams, "is_capturing", lambda device: True)


def test_a_cpu_records_nothing():
    assert not streams.is_capturing(torch.device("cpu"))


@pytest.mark.parametrize("masked", [True, False])
def test_what_is_kept_is_not_made_while_a_graph_is_recorded(masked):
    """Only the replay would fill its tensors."""
    clear_caches()
    mask = masks.causal(20, block=16) if masked else None
    q, k, v = tensors(requires_grad=True)
    with recorded(), pytest.raises(RuntimeError, match="before the capture, call it once with the same mask"):
        attention(q, k, v, mask, backend="triton")
    out = attention(q, k, v, mask, backend="triton")
    with recorded():
        assert torch.equal(attention(q, k, v, mask, backend="triton"), out)
        with pytest.raises(RuntimeError, match="forward and, if that is recorded, backward"):
            out.sum().backward()
        with pytest.raises(RuntimeError, match="before the capture"):
            attention(q.float(), k.float(), v.float(), mask, backend="triton")
    out = attention(q, k, v, mask, backend="triton")
    out.sum().backward()
    with recorded():
        attention(q, k, v, mask, backend="triton").sum().backward()


def test_a_mask_that_the_graph_itself_makes_is_planned_there():
    attention(*tensors(), made_dynamic(masks.causal(20, block=16), 1), backend="triton")
    with recorded():
        dynamic = made_dynamic(masks.causal(20, block=16), 0)
        attention(*tensors(), dynamic, backend="triton")
        attention(*tensors(), dynamic, backend="triton")
        assert len(plans_of(dynamic)) == 1


def test_nothing_that_a_graph_records_is_kept_with_a_mask_that_was_there_before():
    dynamic = made_dynamic(masks.causal(20, block=16), 0)
    q, k, v = tensors(requires_grad=True)
    attention(q, k, v, made_dynamic(masks.causal(20, block=16), 1), backend="triton").sum().backward()
    with recorded():
        attention(q, k, v, dynamic, backend="triton").sum().backward()
    assert plans_of(dynamic) == [] and "columns" not in mask_cache(dynamic.indices)
    attention(*tensors(), dynamic, backend="triton")
    assert len(plans_of(dynamic)) == 1


def test_a_mask_that_a_graph_has_made_keeps_nothing_between_replays():
    def chosen(seed):
        scores = torch.rand(4, 4, generator=torch.Generator().manual_seed(seed))
        return masks.top_k_blocks(scores, k=2, q_len=60, block=16)

    attention(*tensors(60), chosen(3), backend="triton")
    with recorded():
        mask = chosen(0)
        attention(*tensors(60), mask, backend="triton")
    for replay in (1, 2):
        other = chosen(replay)
        for name in ("indptr", "indices", "tile", "words"):
            getattr(mask, name).copy_(getattr(other, name))
        got, want = (attention(*tensors(60), each, backend="triton") for each in (mask, other))
        assert torch.equal(got, want)


def test_plans_that_nobody_recorded_are_few():
    mask = masks.causal(3, block=16)
    with mock.patch.object(planning, "_MOST_PLANS", 4):
        for batch in range(1, 7):
            attention(*tensors(3, batch), mask, backend="triton")
    assert [each.worklist(0, 16).work.shape[0] for each in plans_of(mask)] == [5, 6]
