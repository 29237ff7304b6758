"""What only a GPU can show: the same bits every time, more than 2^31 elements, no waiting for the device."""

import tempfile
from pathlib import Path

import pytest
import torch

from experiments.benchmarks.speed import patterns
from sparseflash import BlockMask, attention, masks
from tests.backends.triton.plans import kernels_of
from tests.watched.waiting import waiting_raises

pytestmark = pytest.mark.gpu


def inputs(*shape, dtype=torch.bfloat16, kv_heads=None, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    batch, heads, tokens, dim = shape
    sizes = [(batch, heads, tokens, dim), *[(batch, kv_heads or heads, tokens, dim)] * 2]
    return [torch.randn(s, generator=generator, device="cuda", dtype=dtype).requires_grad_() for s in sizes]


def forward_and_backward(q, k, v, mask, backend=None):
    out, lse = attention(q, k, v, mask, return_lse=True, backend=backend)
    live = lse.isfinite()
    return (out.detach(), lse.detach(), *torch.autograd.grad(out.float().square().sum() + lse[live].sum(), (q, k, v)))


def mask_with_empty_rows_and_columns(tokens):
    generator = torch.Generator().manual_seed(1)
    layout = torch.rand(4, -(-tokens // 64), -(-tokens // 64), generator=generator) < 0.2
    layout[:, ::5] = False
    layout[:, :, ::7] = False
    return BlockMask.from_layout(layout, block=64, q_len=tokens, k_len=tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 128])
def test_twenty_runs_give_the_same_bits_and_no_nan(dim, dtype):
    tokens = 4000
    mask = mask_with_empty_rows_and_columns(tokens).to("cuda")
    tensors = inputs(2, 4, tokens, dim, dtype=dtype, kv_heads=2)
    first = forward_and_backward(*tensors, mask)
    assert (first[1] == -torch.inf).any(), "the mask must have empty rows for this test to mean anything"
    for name, x in zip(("out", "dq", "dk", "dv"), (first[0], *first[2:]), strict=True):
        assert x.isfinite().all(), name
    for _ in range(19):
        for a, b in zip(first, forward_and_backward(*tensors, mask), strict=True):
            assert torch.equal(a, b)


def bigbird(tokens):
    return BlockMask.from_layout(patterns.bigbird(tokens // 128), block=128)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(("dim", "dtype"), [(128, torch.bfloat16), (64, torch.bfloat16), (64, torch.float32)], ids=str)
@pytest.mark.parametrize("backend", ["triton", None], ids=["portable", "picked"])
def test_global_rows_and_columns_in_chunks_are_right_and_the_same_bits_in_twenty_runs(backend, dim, dtype, padded):
    tokens = 8192
    mask = bigbird(tokens).to("cuda")
    if padded:
        mask = mask.with_lengths(torch.tensor([tokens - 1000], device="cuda"))
    tensors = inputs(1, 2, tokens, dim, dtype=dtype, kv_heads=1)
    first = forward_and_backward(*tensors, mask, backend)
    if backend == "triton":
        cut = {name for name, kernel in kernels_of(mask).items() if kernel.work.parts > 0}
        assert cut == {"forward", "dq", "dk_dv"} | ({"means"} if dtype == torch.float32 else set())
    for _ in range(19):
        for a, b in zip(first, forward_and_backward(*tensors, mask, backend), strict=True):
            assert torch.equal(a, b)
    close = 0.05 if dtype == torch.bfloat16 else 1e-4
    for a, b in zip(first, forward_and_backward(*tensors, mask, "reference"), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=close * b[b.isfinite()].abs().max().item())


@pytest.mark.parametrize(("dim", "backend"), [(32, "triton"), (64, "triton"), (128, "triton"), (128, None)])
@pytest.mark.parametrize("pattern", ["dense", "butterfly", "local"])
def test_sequences_much_shorter_than_their_rows_are_what_they_are_alone(pattern, dim, backend):
    tokens, lengths = 2048, torch.tensor([2000, 501, 640, 77, 1023, 1999, 129, 768])
    build = {
        "dense": BlockMask.dense,
        "butterfly": masks.butterfly,
        "local": lambda n, block: masks.local(n, window=512, block=block),
    }
    mask = build[pattern](tokens, block=128).to("cuda")
    q, k, v = (x.detach() for x in inputs(len(lengths), 20, tokens, dim))
    past = (torch.arange(tokens) >= lengths[:, None]).to("cuda")[:, None, :, None]
    k, v = k.masked_fill(past, 1.0), v.masked_fill(past, 20.0)
    q = (q + 0.5).requires_grad_()
    tensors = q, k.requires_grad_(), v.requires_grad_()
    got = forward_and_backward(*tensors, mask.with_lengths(lengths.to("cuda")), backend)
    if backend == "triton":
        assert all(kernel.choice.descriptors for kernel in kernels_of(mask).values())
    for number, length in enumerate(lengths.tolist()):
        alone = [x[number : number + 1, :, :length].detach().double().requires_grad_() for x in tensors]
        want = forward_and_backward(*alone, mask.crop(q=(0, length), k=(0, length)), "reference")
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
            # Plain attention in bf16 is off by up to 0.034 of the largest.
            error = (a[number : number + 1, :, :length] - b).abs().max() / b.abs().max()
            assert error < 0.03, f"{name} of {number}: {error:.3f}"


def test_a_cuda_graph_of_a_mask_in_chunks_gives_the_same_bits():
    q, k, v = (x.detach() for x in inputs(1, 1, 8192, 128))
    mask = bigbird(8192).to("cuda")
    want = attention(q, k, v, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, mask)
    for _ in range(2):
        out.zero_()
        graph.replay()
        assert torch.equal(out, want)


@pytest.fixture
def memory_to_itself():
    """For tests that need tens of gigabytes: other processes test on the same GPU."""
    import fcntl

    with open(Path(tempfile.gettempdir()) / "sparseflash-tests-memory.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
@pytest.mark.usefixtures("memory_to_itself")
def test_tensors_of_more_than_two_to_the_31_elements(layout):
    heads, tokens, dim = 66, 262_144, 128
    assert heads * tokens * dim > 2**31
    shape = (1, heads, tokens, dim) if layout == "heads first" else (1, tokens, heads, dim)
    mask = masks.local(tokens, window=100).to("cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    if layout == "tokens first":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = attention(q, k, v, mask, return_lse=True)
    (dq, dk, dv) = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    # The last head lies past 2^31 elements; alone it does not.
    last = [x[:, -1:].detach().contiguous().requires_grad_() for x in (q, k, v)]
    want, want_lse = attention(*last, mask, return_lse=True)
    want_gradients = torch.autograd.grad(want, last, torch.ones_like(want))
    assert torch.equal(out[:, -1:], want)
    assert torch.equal(lse[:, -1:], want_lse)
    for a, b in zip((dq, dk, dv), want_gradients, strict=True):
        assert torch.equal(a[:, -1:], b)


def test_a_step_with_new_lengths_waits_for_nothing():
    q, k, v = inputs(4, 2, 1000, 64)
    base = masks.butterfly(1000, block=64).to("cuda")
    lengths = torch.randint(1, 1001, (4,), device="cuda")
    attention(q, k, v, base.with_lengths(lengths)).sum().backward()
    with waiting_raises():
        attention(q, k, v, base.with_lengths(lengths // 2)).sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["dense", "butterfly", "lengths"])
def test_a_cuda_graph_replays_forward_and_backward(name, dtype):
    tokens, dim = 2000, 64
    base = None if name == "dense" else masks.butterfly(tokens, block=64).to("cuda")
    lengths = torch.tensor([2000, 1500], device="cuda", dtype=torch.int32)
    mask = base.with_lengths(lengths) if name == "lengths" else base
    tensors = inputs(2, 4, tokens, dim, dtype=dtype, kv_heads=2)
    dout = torch.randn(2, 4, tokens, dim, device="cuda", dtype=dtype)

    def step():
        out = attention(*tensors, mask)
        return out.detach(), *torch.autograd.grad(out, tensors, dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        with torch.no_grad():
            for x, fresh in zip(tensors, inputs(2, 4, tokens, dim, dtype=dtype, kv_heads=2, seed=seed), strict=True):
                x.copy_(fresh)
        graph.replay()
        for a, b in zip(captured, step(), strict=True):
            assert torch.equal(a, b)


def test_a_mask_made_on_the_gpu_equals_the_one_made_on_the_cpu():
    dense = torch.rand(2, 3, 300, 200) < 0.3
    dense[:, :, 50:150] = False
    assert BlockMask.from_dense(dense.cuda(), block=32) == BlockMask.from_dense(dense, block=32)


def test_a_mask_on_another_device_is_refused():
    q, k, v = inputs(1, 1, 256, 64)
    expected = rf"mask must be on q's device {q.device}; it is on cpu.*mask\.to\(q\.device\)"
    with pytest.raises(ValueError, match=expected):
        attention(q, k, v, masks.causal(256))


def test_autocast_runs_the_kernel_in_half_precision():
    q, k, v = inputs(1, 2, 256, 64, dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        out = attention(q, k, v, masks.causal(256).to("cuda"))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), masks.causal(256).to("cuda")))


def test_dense_attention_equals_pytorchs_own():
    q, k, v = inputs(2, 4, 1000, 128, dtype=torch.float16)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(attention(q, k, v), want, atol=2e-3, rtol=0)


def test_compiles_with_inductor_into_one_graph_with_gradients():
    mask = masks.local(512, window=200).to("cuda")

    def loss(q, k, v):
        return attention(q * 2, k, v, mask).float().square().mean()

    tensors = inputs(1, 2, 512, 64)
    want = torch.autograd.grad(loss(*tensors), tensors)
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*tensors), tensors)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-6)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_compiled_stack_of_layers_that_choose_their_masks(mode):
    """Inductor reuses the memory of one layer's mask for another layer's mask."""
    if mode is not None and not hasattr(torch.Tag, "cudagraph_unsafe"):
        pytest.skip("this PyTorch would record the operators in CUDA graphs")

    def stack(x):
        for _ in range(5):
            heads = x.view(1, 2048, 4, 64).transpose(1, 2)
            chosen = masks.top_k_blocks(masks.pooled_scores(heads, heads, block=64), k=4, q_len=2048, block=64)
            x = torch.nn.functional.normalize(x + attention(heads, heads, heads, chosen).transpose(1, 2).flatten(2))
        return x

    torch.compiler.reset()
    compiled = torch.compile(stack, fullgraph=True, mode=mode)
    for seed in range(3):
        x = inputs(1, 1, 2048, 256, dtype=torch.float32, seed=seed)[0][0].detach()
        for grad in (False, True):
            got, want = (each(x.clone().requires_grad_(grad)) for each in (compiled, stack))
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_plans_made_in_the_warm_up_of_a_compiled_cuda_graph():
    if not hasattr(torch.Tag, "cudagraph_unsafe"):
        pytest.skip("this PyTorch would record the operators in CUDA graphs")
    mask, fresh = (masks.local(3000, window=300).to("cuda") for _ in range(2))
    q, k, v = (x.detach() for x in inputs(1, 2, 3000, 64))
    want = [attention(q, k, v, mask), attention(q, k, v)]

    def both(q, k, v, mask):
        return [2.0 * attention(q * 1.0, k, v, each) for each in (mask, None)]

    torch.compiler.reset()
    compiled = torch.compile(both, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        for got, expected in zip(compiled(q, k, v, fresh), want, strict=True):
            torch.testing.assert_close(got, 2.0 * expected)
    assert torch.equal(attention(q, k, v, fresh), want[0]) and torch.equal(attention(q, k, v), want[1])


def test_a_plan_made_on_one_stream_serves_another():
    """The second stream must wait for the plan, and the plan's memory must last."""
    q, k, v = (x.detach() for x in inputs(2, 8, 8192, 64))
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    want = attention(q, k, v, masks.butterfly(8192, block=64).to("cuda"))
    for _ in range(5):
        mask = masks.butterfly(8192, block=64).to("cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            torch.cuda._sleep(20_000_000)  # about 10 ms, before the plan is made
            one = attention(q, k, v, mask)
        with torch.cuda.stream(second):
            two = attention(q, k, v, mask)
        del mask
        with torch.cuda.stream(first):
            overwritten = [torch.full((1 << 16,), -1, device="cuda", dtype=torch.int32) for _ in range(64)]
        torch.cuda.synchronize()
        assert torch.equal(one, want) and torch.equal(two, want) and len(overwritten) == 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_ragged_sparse_case(dtype):
    """For `compute-sanitizer --tool memcheck python -m pytest -m gpu -k ragged`."""
    q, k, v = inputs(2, 2, 333, 72, dtype=dtype, kv_heads=1)
    pattern = (
        masks.local(333, window=50, block=64) if dtype == torch.float32 else masks.butterfly(333, block=32, causal=True)
    )
    mask = pattern.to("cuda").with_lengths(torch.tensor([333, 201], device="cuda"))
    got, want = (forward_and_backward(q, k, v, mask, backend) for backend in ("triton", "reference"))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.05 * b[b.isfinite()].abs().max().item())
