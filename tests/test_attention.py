import importlib
import re
import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

from sparseflash import BlockMask, attention, explain, masks, scores, sdpa
from sparseflash.grouped import selected_attention
from tests.processes.forked import python

BACKENDS = ["reference", "blockwise", "triton"]
CLOSE = {"rtol": 1e-5, "atol": 2e-5}


def tensors(q_len, k_len=None, *, heads=2, kv_heads=None, dim=16, v_dim=None, batch=1, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    k_len, kv_heads, v_dim = k_len or q_len, kv_heads or heads, v_dim or dim
    shapes = (batch, heads, q_len, dim), (batch, kv_heads, k_len, dim), (batch, kv_heads, k_len, v_dim)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


# ---------------------------------------------------------------------- what follows from the definition


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "dense mask"])
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (40, 40), (37, 70), (64, 31)])
def test_with_every_score_live_it_is_pytorchs_attention(backend, masked, q_len, k_len):
    q, k, v = (x.requires_grad_() for x in tensors(q_len, k_len, heads=4, kv_heads=2, v_dim=24))
    mask = BlockMask.dense(q_len, k_len, block=32) if masked else None
    out = attention(q, k, v, mask, backend=backend)
    want = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(out, want, **CLOSE)
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    for a, b in zip(*(torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (out, want))):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_grouped_head_reads_the_key_head_of_its_group(backend):
    q, k, v = tensors(160, heads=6, kv_heads=2)
    want = attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), backend=backend)
    torch.testing.assert_close(attention(q, k, v, backend=backend), want, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
def test_any_scale_multiplies_the_scores(backend, scale):
    q, k, v = tensors(40)
    want = scaled_dot_product_attention(q, k, v, scale=scale)
    torch.testing.assert_close(attention(q, k, v, scale=scale, backend=backend), want, **CLOSE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_mask_gives_zeros_and_zero_gradients(backend):
    q, k, v = (x.requires_grad_() for x in tensors(40))
    mask = BlockMask.from_dense(torch.zeros(40, 40, dtype=torch.bool), block=16)
    out, lse = attention(q, k, v, mask, return_lse=True, backend=backend)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert (gradient == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("batch", "q_len", "k_len"), [(0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0)])
def test_nothing_to_do_is_done(backend, batch, q_len, k_len):
    q, v = torch.randn(batch, 2, q_len, 16), torch.randn(batch, 2, k_len, 24)
    q, k, v = (x.requires_grad_() for x in (q, torch.randn(batch, 2, k_len, 16), v))
    out, lse = attention(q, k, v, return_lse=True, backend=backend)
    assert out.shape == (batch, 2, q_len, 24)
    assert lse.shape == (batch, 2, q_len)
    if k_len == 0:
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
    for gradient, x in zip(torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True, materialize_grads=True),
                           (q, k, v)):  # fmt: skip
        assert gradient.shape == x.shape
        assert (gradient == 0).all()


def test_blockwise_takes_gradients_that_gradcheck_confirms():
    live = torch.rand(20, 24, generator=torch.Generator().manual_seed(0)) < 0.4
    live[3] = False
    mask = BlockMask.from_dense(live, block=16)
    inputs = [x.requires_grad_() for x in tensors(20, 24, heads=2, kv_heads=1, dim=3, v_dim=2, dtype=torch.float64)]
    has_keys = live.any(1)

    def function(q, k, v):
        out, lse = attention(q, k, v, mask, return_lse=True)
        return out, lse[..., has_keys]

    assert torch.autograd.gradcheck(function, inputs)


def test_cpu_tensors_go_to_blockwise_by_default():
    q, k, v = tensors(40)
    mask = masks.local(40, window=9, block=16)
    assert torch.equal(attention(q, k, v, mask), attention(q, k, v, mask, backend="blockwise"))
    with torch.profiler.profile() as profile:
        attention(q, k, v, mask)
    names = {event.key for event in profile.key_averages()}
    assert "sparseflash::blockwise" in names


# ---------------------------------------------------------------------- what it refuses

Q = torch.zeros(2, 4, 32, 16)
LEARNED = torch.linspace(0.1, 0.4, 4)[:, None]  # of four heads
JAGGED = torch.nested.nested_tensor([torch.zeros(n, 4, 16) for n in (5, 9)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (([1.0], Q, Q), TypeError, r"q must be a tensor; got list"),
        ((Q, None, Q), TypeError, r"k must be a tensor; got NoneType"),
        ((Q, Q, Q[0]), ValueError, r"v must have shape \[batch, heads, tokens, head dim\]; got \[4, 32, 16\]"),
        ((Q.int(), Q, Q), TypeError, r"q must have a floating dtype \(.*; got torch\.int32"),
        ((Q.bool(), Q, Q), TypeError, r"q must have a floating dtype \(.*; got torch\.bool"),
        ((Q.to(torch.complex64), Q, Q), TypeError, r"q must have a floating dtype \(.*; got torch\.complex64"),
        (
            (Q.to(torch.float8_e4m3fn),) * 3,
            TypeError,
            r"q must have a floating dtype \(fp16, bf16, fp32 or fp64\); got torch\.float8_e4m3fn\. Cast it first",
        ),
        ((Q, Q.to_sparse(), Q), TypeError, r"k must be a dense tensor; got one with the layout torch\.sparse_coo"),
        ((JAGGED, JAGGED, JAGGED), TypeError, r"q must be a plain tensor; got a nested one\. .* attention_varlen"),
        ((Q, Q.to("meta"), Q), ValueError, r"q, k and v must be on one device; q is on cpu, k is on meta"),
        ((Q, Q[:1], Q), ValueError, r"q, k and v must have one batch size; q has 2, k has 1"),
        ((Q, Q[:, :2], Q), ValueError, r"k and v must have the same heads and tokens; got \[2, 32\] and \[4, 32\]"),
        ((Q, Q, Q[:, :, :30]), ValueError, r"k and v must have the same heads and tokens; got \[4, 32\] and \[4, 30\]"),
        ((Q, Q[..., :8], Q), ValueError, r"q and k must have the same head dim; got 16 and 8"),
        ((Q[..., :0], Q[..., :0], Q), ValueError, r"head dims must be at least 1; got D = 0 and Dv = 16"),
        ((Q, Q[:, :3], Q[:, :3]), ValueError, r"must be a multiple of the number of key heads; got 4 and 3"),
        ((Q, Q.transpose(1, 2), Q.transpose(1, 2)), ValueError, r"got 4 and 32\. If a tensor is \[batch, tokens"),
        ((Q, Q[:, :0], Q[:, :0]), ValueError, r"q and k must have at least 1 head; got 4 and 0"),
        ((Q[:, :0], Q[:, :0], Q[:, :0]), ValueError, r"q and k must have at least 1 head; got 0 and 0"),
        ((Q, Q.half(), Q), TypeError, r"q, k and v must have one dtype; got torch\.float32, torch\.float16"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(inputs, error, message):
    for backend in (None, "triton", "reference"):
        with pytest.raises(error, match=message):
            attention(*inputs, backend=backend)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (
            torch.ones(32, 32, dtype=torch.bool),
            TypeError,
            r"sparseflash BlockMask or None; got torch\.Tensor.*from_dense",
        ),
        (
            create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 32, 32, device="cpu"),
            TypeError,
            r"sparseflash BlockMask or None; got torch\.nn\.attention.*\.BlockMask .*from_flex",
        ),
        (torch.zeros(32, 32), TypeError, r"got torch\.Tensor .*interop\.from_sdpa tensors of 0 and -inf"),
        ([masks.causal(32)] * 4, TypeError, r"got list .*masks\.per_head and masks\.per_batch lists of masks"),
        (masks.causal, TypeError, r"got function .*from_function rules.* a pattern is called .*masks\.causal\(q_len\)"),
        (masks.causal(33), ValueError, r"is for 33 queries and 33 keys, got 32 and 32"),
        (masks.causal(32, 64), ValueError, r"is for 32 queries and 64 keys, got 32 and 32"),
        (BlockMask.from_dense(torch.rand(3, 1, 32, 32) < 0.5), ValueError, r"mask must be for 1 or 2 batch.*for 3"),
        (BlockMask.from_dense(torch.rand(1, 2, 32, 32) < 0.5), ValueError, r"mask must be for 1 or 4 heads.*for 2"),
        (
            masks.causal(32).with_lengths(torch.tensor([1, 2, 3])),
            ValueError,
            r"mask must have lengths for 1 or 2 batch elements.*it has 3",
        ),
        (
            masks.causal(32).to("meta"),
            ValueError,
            r"mask must be on q's device cpu; it is on meta\. Move it once: mask",
        ),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_that_do_not_fit_are_refused(backend, mask, error, message):
    with pytest.raises(error, match=message):
        attention(Q, Q, Q, mask, backend=backend)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (masks.per_batch([masks.causal(32)] * 3), "mask must be for 1 batch element, as q has; it is for 3."),
        (masks.per_head([masks.causal(32)] * 3), "mask must be for 1 head, as q has; it is for 3."),
        (masks.causal(32).with_lengths([1, 2]), "mask must have lengths for 1 batch element, as q has; it has 2."),
    ],
)
def test_masks_that_do_not_fit_one_batch_element_and_head_are_refused(mask, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(Q[:1, :1], Q[:1, :1], Q[:1, :1], mask)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_single_length_holds_for_the_whole_batch(backend):
    mask = masks.causal(32, block=16)
    q = torch.rand_like(Q).requires_grad_()
    k, v = torch.rand_like(Q), torch.rand_like(Q)
    one = attention(q, k, v, mask.with_lengths([20]), backend=backend)
    two = attention(q, k, v, mask.with_lengths([20, 20]), backend=backend)
    assert torch.equal(one, two) and one[:, :, :20].any() and not one[:, :, 20:].any()
    one.sum().backward()
    assert not q.grad[:, :, 20:].any()


def test_an_unknown_backend_is_refused():
    with pytest.raises(
        ValueError, match=r"backend must be one of 'triton', 'hopper', 'blockwise', 'reference', or None; got 'x'"
    ):
        attention(Q, Q, Q, backend="x")


@pytest.mark.parametrize("backend", [[], {}, 2.5, ("triton",)])
@pytest.mark.parametrize("call", [attention, sdpa, explain])
def test_a_backend_that_is_no_name_is_refused(call, backend):
    with pytest.raises(ValueError, match=f"backend must be one of .*, or None; got {re.escape(repr(backend))}"):
        call(Q, Q, Q, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_before_heads_are_noticed(backend):
    with pytest.raises(
        ValueError, match=r"got 4 and 4\. q looks like \[batch, tokens, heads, head dim\]: pass q.transpo"
    ):
        attention(*[Q.transpose(1, 2)] * 3, masks.causal(32), backend=backend)
    with pytest.raises(ValueError, match=r"got 32 and 32\. For part of a longer sequence use mask\.crop"):
        attention(Q, Q, Q, masks.causal(33), backend=backend)
    with pytest.raises(ValueError, match=r"masks\.documents takes lengths, so pass it the differences of running"):
        attention(Q, Q, Q, masks.documents([0, 10, 32]), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_patterns_of_key_heads_are_told_how_to_be_those_of_query_heads(backend):
    mask = masks.per_head([masks.causal(32, block=16), masks.local(32, window=8, block=16)])
    with pytest.raises(
        ValueError, match=r"it is for 2\. To use one pattern for each key head, pass mask\.select"
    ) as caught:
        attention(Q, Q[:, :2], Q[:, :2], mask, backend=backend)
    advice = str(caught.value).partition("pass mask.select(heads=")[2].removesuffix(").")
    mask = mask.select(heads=eval(advice))
    assert mask == masks.per_head([mask.select(heads=h) for h in (0, 0, 2, 2)])
    attention(Q, Q[:, :2], Q[:, :2], mask, backend=backend)


def test_a_learned_scale_is_refused_for_no_gradient_would_reach_it():
    with pytest.raises(TypeError, match=r"attention\(q \* scale, k, v, scale=1\.0\)"):
        attention(Q, Q, Q, scale=torch.tensor(0.1, requires_grad=True))


def test_a_scale_may_change_under_torch_compile():
    torch.compiler.reset()
    compiled = torch.compile(lambda scale: attention(Q, Q, Q, scale=scale), fullgraph=True, backend="aot_eager")
    for scale in (0.1, 0.2, 0.3):
        assert torch.equal(compiled(scale), attention(Q, Q, Q, scale=scale))


@pytest.mark.parametrize(
    "call",
    [
        lambda q: attention(q, q, q, scores=scores.key_bias(LEARNED.expand(4, 50)[None])),
        lambda q: attention(q, q, q, scores=scores.bias(LEARNED[:2, :, None, None].expand(2, 4, 50, 50))),
        lambda q: attention(q, q, q, scores=scores.temperature(LEARNED.expand(2, 4, 50) + 1.0)),
        lambda q: attention(q, q, q, masks.causal(50, block=16).with_lengths(torch.full((2,), 30))),
        lambda q: sdpa(q, torch.ones(2, 4, 50, 16), torch.ones(2, 4, 50, 16)),
        lambda q: selected_attention(q, q, q, torch.zeros(2, 4, 50, 1, dtype=torch.int64), span=16),
    ],
)  # fmt: skip
def test_sizes_that_do_not_change_fit_those_that_may_under_torch_compile(call):
    torch.compiler.reset()
    q = torch.rand(2, 4, 50, 16)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(q), call(q))


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_refused(scale):
    with pytest.raises(ValueError, match=r"scale must be finite; got (nan|inf)"):
        attention(Q, Q, Q, scale=scale)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (
            (Q.double(),) * 3,
            TypeError,
            r"q must be fp16, bf16 or fp32 .*; got torch\.float64\. backend='blockwise' takes",
        ),
        ((Q.bfloat16(),) * 3, TypeError, r"interpreter silently computes bf16 wrongly"),
        ((Q[..., :8],) * 3, ValueError, r"head dims must be from 16 to 256 .*; got D = 8\. backend='blockwise'"),
        ((Q, Q, Q.repeat(1, 1, 1, 17)), ValueError, r"head dims must be from 16 to 256 .*; got Dv = 272"),
        (
            (Q, Q, Q.mT.contiguous().mT),
            ValueError,
            r"v must be contiguous in its last dimension.*Call \.contiguous\(\)",
        ),
    ],
)
def test_what_only_the_kernel_does_not_take_is_refused(inputs, error, message):
    with pytest.raises(error, match=message):
        attention(*inputs, backend="triton")


def run_without_the_interpreter(program):
    prelude = "import torch, sparseflash\nq = torch.zeros(1, 1, 32, 16)\n"
    done = python("-c", prelude + program)
    assert done.returncode == 0, done.stderr
    return done.stdout


CALLS_OF_KERNELS = {
    "attention": "sparseflash.attention(q, q, q, backend='triton')",
    "hopper": "sparseflash.attention(q, q, q, backend='hopper')",
    "scores": "sparseflash.attention(q, q, q, scores=sparseflash.scores.softcap(3.0), backend='triton')",
    "block index": "sparseflash.attention(q, q, q, chosen, backend='triton')",
    "varlen": "sparseflash.attention_varlen(q[0, 0, :, None], *[q[0, 0, :, None]] * 2, [0, 32], backend='triton')",
    "selected": "sparseflash.grouped.selected_attention(q, q, q, index.expand(1, 32, 1), backend='triton')",
    "sdpa": "sparseflash.sdpa(q, q, q, backend='triton')",
    "explain": "sparseflash.explain(q, q, q, backend='triton')",
    "cache": "sparseflash.decode.attention_with_cache(q, q, q, index[0, 0] + 32, backend='triton')",
    "cache, nothing": "sparseflash.decode.attention_with_cache(*[q[:0]] * 3, index[0, 0, :0], backend='triton')",
}


def errors_of_kernels(program=""):
    shown = run_without_the_interpreter(f"""
{program}
import sparseflash.decode, sparseflash.grouped, sparseflash.scores
index = torch.zeros(1, 1, 1, dtype=torch.int64)
chosen = sparseflash.BlockMask.from_block_index(index.expand(1, 2, 1), block=16, q_len=32)
for name, call in {CALLS_OF_KERNELS}.items():
    try:
        eval(call)
    except RuntimeError as error:
        print(name, " ".join(str(error).split()), sep=": ")
""")
    return dict(line.split(": ", 1) for line in shown.splitlines())


def test_cpu_tensors_without_the_interpreter_are_refused():
    found = errors_of_kernels()
    assert found == dict.fromkeys(CALLS_OF_KERNELS, found["attention"])
    shown = found["attention"]
    assert "Triton's kernels run on NVIDIA GPUs; got tensors on cpu." in shown
    assert "backend='blockwise'" in shown
    assert "TRITON_INTERPRET=1" in shown


def test_without_triton_its_backend_says_so_and_the_others_run():
    found = errors_of_kernels("""
import sys
sys.modules["triton"] = None  # what makes `import triton` fail as if it were not installed
sparseflash.attention(q, q, q)
""")
    assert found == dict.fromkeys(CALLS_OF_KERNELS, found["attention"])
    shown = found["attention"]
    assert "backend='triton' needs the package triton, which is not installed: pip install triton" in shown


def test_a_gpu_that_is_too_old_is_refused(monkeypatch):
    from sparseflash.backends.triton.device import check_device

    check_device.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(RuntimeError, match=r"needs compute capability 8\.0 \(Ampere\) or newer; Tesla T4 has 7\.5"):
        check_device(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    check_device(torch.device("cuda", 0))
    check_device.cache_clear()


@pytest.mark.parametrize("backend", ["blockwise", "reference"])
def test_shapes_come_out_on_the_meta_device(backend):
    q, k, v = (torch.empty(2, 2, 40, 16, device="meta", requires_grad=True) for _ in range(3))
    out = attention(q, k, v, masks.causal(40, block=32).to("meta"), backend=backend)
    out.sum().backward()
    assert out.shape == q.shape == q.grad.shape
    assert out.device.type == "meta"


@pytest.mark.parametrize(("dim", "v_dim"), [(8, 8), (300, 300), (16, 8), (300, 64)])
def test_head_dims_that_no_kernel_takes_are_told_once(dim, v_dim, monkeypatch):
    module = importlib.import_module("sparseflash.attention")
    monkeypatch.setattr(module, "_has_warned", False)
    q, k, v = (torch.randn(1, 2, 20, n) for n in (dim, dim, v_dim))
    said = rf"head dims D = {dim} and Dv = {v_dim} are computed here, on the CPU, but no kernel for GPUs takes them"
    with pytest.warns(UserWarning, match=said) as warned:
        attention(q, k, v)
        attention(q, k, v)
    assert len(warned) == 1 and warned[0].filename == __file__


def test_head_dims_are_not_told_where_they_are_meant_or_fit(monkeypatch):
    module = importlib.import_module("sparseflash.attention")
    monkeypatch.setattr(module, "_has_warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dim, backend in ((8, "blockwise"), (8, "reference"), (16, None), (256, None)):
            x = torch.randn(1, 2, 20, dim)
            attention(x, x, x, backend=backend)
