import ctypes
import gc
import weakref

import pytest
import torch

from sparseflash import attention, clear_caches, masks
from sparseflash.blockmask import graph_memory
from sparseflash.blockmask.streams import ReadyEvent


def test_what_is_kept_goes_when_the_graph_posts_its_semaphore():
    kept = graph_memory._Kept()
    kept.tensors[0] = x = torch.ones(3)
    alive = weakref.ref(x)
    del x
    graph_memory._graphs[-1] = kept
    semaphore = kept.semaphore
    del kept
    graph_memory.release_finished()
    assert alive() is not None
    ctypes.CDLL(None).sem_post(semaphore)
    graph_memory.release_finished()
    assert alive() is None and -1 not in graph_memory._graphs


def inputs(tokens=256, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(1, 2, tokens, 64, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def overwrite_what_is_free():
    filled = [
        torch.full((1 << size,), -1, device="cuda", dtype=torch.int32) for size in range(4, 22) for _ in range(24)
    ]
    torch.cuda.synchronize()
    return filled


def recorded(step):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


@pytest.mark.gpu
@pytest.mark.parametrize("choose", ["top_k_blocks", "mass_blocks", "selected_keys"])
def test_a_graph_that_chooses_stays_right_after_other_lengths_were_chosen(choose):
    """The candidate tiles are cached, 32 sets of them."""
    q, k, v = inputs()

    def chosen(tokens, q, k):
        if choose == "selected_keys":
            indices = (q.float() @ k.float().mT).topk(32).indices
            return masks.selected_keys(indices, k_len=tokens, block=64, causal=True)
        scores = masks.pooled_scores(q, k, block=64)
        how_many = {"top_k_blocks": {"k": 2}, "mass_blocks": {"mass": 0.7}}[choose]
        return getattr(masks, choose)(scores, **how_many, q_len=tokens, block=64, causal=True)

    def step():
        return attention(q, k, v, chosen(256, q, k))

    clear_caches()
    graph, out = recorded(step)
    for tokens in range(65, 65 + 40):
        chosen(tokens, q[:, :, :tokens], k[:, :, :tokens])
    clear_caches()
    gc.collect()
    filled = overwrite_what_is_free()
    for seed in (1, 2):
        for x, fresh in zip((q, k, v), inputs(seed=seed), strict=True):
            x.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, step())
    assert all((x == -1).all() for x in filled)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
def test_a_graph_stays_right_after_its_mask_was_deleted_and_the_caches_were_emptied(training):
    tensors = inputs()

    def record():
        mask = masks.butterfly(256, block=64).to("cuda")

        def step():
            leaves = [x.detach().requires_grad_(training) for x in tensors]
            out = attention(*leaves, mask)
            return (out, *torch.autograd.grad(out.sum(), leaves)) if training else (out,)

        return *recorded(step), [x.clone() for x in step()]

    graph, results, want = record()
    clear_caches()
    gc.collect()
    filled = overwrite_what_is_free()
    graph.replay()
    torch.cuda.synchronize()
    for got, expected in zip(results, want, strict=True):
        assert torch.equal(got, expected)
    del filled


@pytest.mark.gpu
def test_what_a_graph_reads_is_freed_with_the_graph():
    clear_caches()
    before = len(graph_memory._graphs)

    def record():
        made = torch.ones(1000, device="cuda")
        ready = ReadyEvent((made,))

        def step():
            ready.wait()
            return made + 1

        return *recorded(step), weakref.ref(made)

    graph, out, alive = record()
    graph_memory.release_finished()
    assert alive() is not None and len(graph_memory._graphs) == before + 1
    del graph, out
    torch.cuda.synchronize()
    graph_memory.release_finished()
    assert alive() is None and len(graph_memory._graphs) == before
