import os

import pytest
import torch

from sparseflash import attention, masks
from sparseflash.backends.problem import Problem
from sparseflash.backends.triton.schedule.plan import plan_of
from tests.masks.chosen_blocks import BUILD, coarse, distinct, generator
from tests.watched.waiting import NoWaiting, waiting_raises

N = 50


def padded_problem(seed=0):
    shapes = [(1, 4, N, 16), (1, 2, N, 16), (1, 2, N, 16)]
    return [torch.randn(s, generator=generator(3 * seed + i)).requires_grad_() for i, s in enumerate(shapes)]


def build(name, q, k):
    if name in BUILD:
        scores = masks.pooled_scores(q, k, block=16)
        return BUILD[name](scores, q_len=N, block=16, causal=True, local_blocks=1)
    chunks = k.unflatten(2, (-1, 2)).mean(3)
    scores = q.unflatten(1, (2, 2)).mean(2) @ chunks.mT
    if name == "keys":
        return masks.top_k_keys(scores, k=3, k_len=N, block=16, span=2, causal=True, group=2)
    return masks.selected_keys(scores.topk(3).indices, k_len=N, block=16, span=2, causal=True, most=3, group=2)


ALL = ["top-k", "mass", "keys", "indices"]


@pytest.mark.parametrize("backend", ["blockwise", "triton"])
@pytest.mark.parametrize("name", ALL)
def test_attention_over_what_was_chosen_is_that_of_the_reference(name, backend):
    q, k, v = padded_problem()
    results = []
    for use in (backend, "reference"):
        mask = build(name, q, k)
        assert mask.shape == (1, 4, N, N)
        out, lse = attention(q, k, v, mask, return_lse=True, backend=use)
        live = lse.isfinite()
        results.append([out, lse, *torch.autograd.grad(out.square().sum() + lse[live].sum(), (q, k, v))])
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_the_choice_passes_no_gradient_on(name):
    q, k, v = padded_problem()
    mask = build(name, q, k)
    assert not masks.pooled_scores(q, k, block=16).requires_grad
    assert not any(getattr(mask, array).requires_grad for array in ("indices", "bits", "tile", "indptr", "words"))
    got = torch.autograd.grad(attention(q, k, v, mask).sum(), (q, k, v))
    want = torch.autograd.grad(attention(q, k, v, mask.canonical()).sum(), (q, k, v))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_the_same_scores_give_the_same_arrays(name):
    q, k, _ = padded_problem()
    first, second = build(name, q, k), build(name, q, k)
    for array in ("indptr", "indices", "tile", "bits", "pattern"):
        assert torch.equal(getattr(first, array), getattr(second, array))


@pytest.mark.parametrize("name", ALL)
def test_torch_compile_makes_one_graph_of_choice_and_attention(name):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def step(q, k, v):
        return attention(q, k, v, build(name, q, k)).sin()

    torch.compiler.reset()
    compiled = torch.compile(step, backend=count, fullgraph=True)
    for seed in (0, 1):
        q, k, v = padded_problem(seed)
        got, want = compiled(q, k, v), step(q, k, v)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        got, want = (torch.autograd.grad(out.sum(), (q, k, v)) for out in (got, want))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1


def test_torch_compile_serves_another_length():
    def step(q, k, v):
        scores = masks.pooled_scores(q, k, block=16)
        return attention(q, k, v, masks.top_k_blocks(scores, k=2, q_len=q.shape[2], block=16, causal=True))

    torch.compiler.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for length in (64, 100, 70):
        q, k, v = torch.randn(3, 1, 2, length, 16, generator=generator(length))
        torch.testing.assert_close(compiled(q, k, v), step(q, k, v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_building_and_planning_wait_for_nothing(name):
    q, k, _ = padded_problem()
    build(name, q, k)
    with NoWaiting():
        mask = build(name, q, k).with_lengths(torch.full((1,), 40))
        plan = plan_of(Problem.of(mask, scale=1.0), (1, 4), 2, (N, N))
        plan.worklist(0, 16), plan.worklist(1, 16)


@pytest.mark.parametrize(
    ("most", "make"),
    [
        (4, lambda x: masks.pooled_scores(x, x, block=16)),
        (25, lambda x: masks.top_k_blocks(x[0, :, :4, :4], k=2, q_len=64, block=16, causal=True, local_blocks=1)),
        (37, lambda x: masks.mass_blocks(x[0, :, :4, :4], mass=0.9, q_len=64, block=16, causal=True, local_blocks=1)),
        (74, lambda x: masks.selected_keys(x[..., :3].long(), k_len=64, block=16, causal=True)),
    ],
    ids=["pooled scores", "top-k", "mass", "selected keys"],
)
def test_few_operations_are_started(most, make):
    x = torch.randn(1, 3, 64, 16)
    make(x)
    with NoWaiting() as seen:
        make(x)
    assert seen.started <= most, "each takes the host about 5 us, which is what a choice costs on a GPU"


@pytest.mark.parametrize("name", ALL)
def test_sizes_are_known_without_any_value(name):
    q, k, _ = padded_problem()
    mask = build(name, q.to("meta"), k.to("meta"))
    assert mask.device.type == "meta"
    for array in ("indptr", "indices", "tile", "bits", "pattern"):
        assert getattr(mask, array).shape == getattr(build(name, q, k), array).shape


def test_heads_of_a_group_share_a_pattern():
    scores = distinct((2, 3, 4, 4), seed=0)
    mask = masks.top_k_blocks(scores, k=2, q_len=64, block=16, group=2)
    assert mask.pattern.tolist() == [[0, 0, 1, 1, 2, 2], [3, 3, 4, 4, 5, 5]]
    assert torch.equal(mask.to_dense()[:, ::2], masks.top_k_blocks(scores, k=2, q_len=64, block=16).to_dense())
    assert masks.top_k_blocks(scores[0, 0], k=2, q_len=64, block=16, group=8).pattern.tolist() == [[0] * 8]


def test_scores_of_half_precision_choose_as_they_are():
    scores = distinct((6, 6), seed=3).bfloat16()
    assert masks.top_k_blocks(scores, k=2, q_len=96, block=16) == masks.top_k_blocks(
        scores.double(), k=2, q_len=96, block=16
    )


def gpu_tensors(tokens=16_384, heads=8):
    g = torch.Generator("cuda").manual_seed(0)
    shape = (1, heads, tokens, 128)
    return [torch.randn(shape, generator=g, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]


def gpu_masks(q, k):
    scores = masks.pooled_scores(q, k)
    indices = torch.randint(0, 16_384 // 64, (1, 1, 16_384, 16), device="cuda")
    sizes = {"q_len": 16_384, "causal": True}
    return {
        "pooled scores": lambda: masks.pooled_scores(q, k),
        "top-k blocks": lambda: masks.top_k_blocks(scores, k=16, sink_blocks=1, local_blocks=2, **sizes),
        "mass of blocks": lambda: masks.mass_blocks(scores, mass=0.9, sink_blocks=1, local_blocks=2, **sizes),
        "selected keys": lambda: masks.selected_keys(indices, k_len=16_384, span=64, causal=True, group=8),
    }


@pytest.mark.gpu
def test_a_new_choice_at_every_step_waits_for_nothing():
    q, k, v = gpu_tensors(4096)

    def step():
        mask = masks.top_k_blocks(masks.pooled_scores(q, k), k=8, q_len=4096, causal=True, local_blocks=1)
        attention(q, k, v, mask).sum().backward()
        mask = masks.mass_blocks(masks.pooled_scores(q, k), mass=0.5, q_len=4096, most=12, causal=True)
        attention(q, k, v, mask).sum().backward()
        indices = torch.randint(0, 64, (1, 8, 4096, 4), device="cuda")
        attention(q, k, v, masks.selected_keys(indices, k_len=4096, span=64, causal=True)).sum().backward()

    step()
    with waiting_raises():
        step()


@pytest.mark.gpu
def test_the_gpu_chooses_what_the_cpu_chooses():
    scores = coarse((2, 4, 40, 40), seed=0)
    for build in BUILD.values():
        arguments = {"q_len": 1270, "block": 32, "causal": True}
        assert build(scores.cuda(), **arguments) == build(scores, **arguments)
    indices = torch.randint(-1, 160, (2, 2, 1270, 7), generator=generator(0))
    on_gpu, on_cpu = (masks.selected_keys(i, k_len=1270, block=32, span=8, most=20) for i in (indices.cuda(), indices))
    assert on_gpu == on_cpu


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["pooled scores", "top-k blocks", "mass of blocks", "selected keys"])
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="times the GPU: run it alone, without -n")
def test_a_mask_for_16384_tokens_takes_under_a_millisecond(name):
    q, k, _ = gpu_tensors()
    make = gpu_masks(q, k)[name]
    make()
    times = []
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(20):
            make()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 20)
    print(f"{name}: {sorted(times)[2]:.3f} ms a mask, of {len(times)} series {min(times):.3f} to {max(times):.3f}")
    assert sorted(times)[2] < 1.0, f"milliseconds a mask: {sorted(times)}"
