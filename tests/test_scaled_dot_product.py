import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import sparseflash
from sparseflash import interop, masks, sdpa
from sparseflash.scaled_dot_product import live_and_bias, upper_left


def drawn(*shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def same(ours, theirs, inputs):
    dout = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=ours.dtype)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(torch.autograd.grad(ours, inputs, dout), torch.autograd.grad(theirs, inputs, dout), strict=True):
        torch.testing.assert_close(a, b)


@given(q_len=st.integers(1, 70), k_len=st.integers(1, 70), block=st.sampled_from([16, 32, (16, 64)]))
@example(q_len=40, k_len=60, block=16)
@example(q_len=60, k_len=40, block=16)
def test_is_causal_is_aligned_at_the_upper_left(q_len, k_len, block):
    inputs = drawn((1, 2, q_len, 16), (1, 2, k_len, 16), (1, 2, k_len, 8))
    same(sdpa(*inputs, is_causal=True, block=block), F.scaled_dot_product_attention(*inputs, is_causal=True), inputs)


@given(
    shape=st.sampled_from([(20, 1), (1, 30), (20, 30), (3, 20, 30), (2, 1, 1, 30), (2, 3, 20, 30)]),
    kind=st.sampled_from(["bool", "bias", "bias and dead"]),
    seed=st.integers(0, 99),
)
def test_a_tensor_that_broadcasts_is_a_mask_and_a_bias(shape, kind, seed):
    q, k, v = drawn((2, 3, 20, 16), (2, 3, 30, 16), (2, 3, 30, 16))
    generator = torch.Generator().manual_seed(seed)
    mask = torch.randn(shape, generator=generator, dtype=torch.float64)
    inputs = [q, k, v]
    if kind == "bool":
        mask = mask > 0
    else:
        if kind == "bias and dead":
            mask = mask.masked_fill(mask > 0.7, -torch.inf)
        inputs.append(mask.requires_grad_())
    same(sdpa(q, k, v, mask, block=16), F.scaled_dot_product_attention(q, k, v, mask), inputs)


def test_other_arguments_are_those_of_pytorch():
    q, k, v = drawn((2, 4, 20, 16), (2, 2, 30, 16), (2, 2, 30, 16))
    same(
        sdpa(q, k, v, scale=0.3, enable_gqa=True),
        F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True),
        [q, k, v],
    )
    q, k, v = drawn((5, 20, 16), (5, 30, 16), (5, 30, 16))
    each = torch.rand(5, 20, 30) < 0.5
    same(sdpa(query=q, key=k, value=v, attn_mask=each), F.scaled_dot_product_attention(q, k, v, each), [q, k, v])
    q, k, v = drawn((20, 16), (30, 16), (30, 16))
    same(sdpa(q, k, v), F.scaled_dot_product_attention(q, k, v), [q, k, v])
    dropped = sdpa(q, k, torch.ones_like(v), dropout_p=0.5)
    assert dropped.std() > 0.05  # without dropout every row is 1


@given(
    batch=st.lists(st.tuples(*[st.booleans()] * 3), min_size=0, max_size=3), heads=st.tuples(*[st.booleans()] * 3),
    masked=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@example(batch=[(False, True, True)], heads=(False, False, False), masked=True, seed=0)
@example(batch=[(False, False, True)], heads=(False, True, True), masked=False, seed=0)
def test_sizes_of_one_are_expanded_as_in_pytorch(batch, heads, masked, seed):
    shapes = [
        (*(1 if of[n] else size for of, size in zip(batch, (2, 3, 2))), 1 if heads[n] else 4, tokens, 16)
        for n, tokens in enumerate((20, 30, 30))
    ]
    q, k, v = drawn(*shapes, seed=seed)
    live = torch.rand(20, 30, generator=torch.Generator().manual_seed(seed)) < 0.7 if masked else None
    if live is not None:
        live[:, 0] = True
    same(sdpa(q, k, v, live, block=16), F.scaled_dot_product_attention(q, k, v, live), [q, k, v])


def test_a_mask_of_the_library_is_used_as_it_is():
    q, k, v = drawn(*[(2, 3, 40, 16)] * 3)
    mask = masks.butterfly(40, block=16)
    same(sdpa(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, interop.to_sdpa(mask)), [q, k, v])


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_causal_biases_of_pytorch_are_masks(make):
    q, k, v = drawn((1, 2, 20, 16), (1, 2, 30, 16), (1, 2, 30, 16))
    dense = torch.ones(20, 30, dtype=torch.bool).tril(10 if make is causal_lower_right else 0)
    same(sdpa(q, k, v, make(20, 30)), F.scaled_dot_product_attention(q, k, v, dense), [q, k, v])
    with pytest.raises(ValueError, match="attn_mask must be of 20 queries and 30 keys; got 30 and 30"):
        sdpa(q, k, v, make(30, 30))


def test_the_mask_of_a_causal_bias_is_on_the_device_that_is_asked_for():
    live, _ = live_and_bias(causal_lower_right(20, 30), 20, 30, device=torch.device("meta"))
    assert live.device == torch.device("meta")


@pytest.mark.gpu
def test_causal_biases_of_pytorch_serve_inputs_on_a_gpu():
    q = torch.randn(1, 2, 20, 16, device="cuda")
    assert sdpa(q, q, q, causal_upper_left(20, 20)).device == q.device


def test_empty_inputs_give_empty_or_zero_outputs():
    live = torch.ones(0, 4, dtype=torch.bool)
    assert sdpa(torch.randn(1, 2, 0, 8), *torch.randn(2, 1, 2, 4, 8), live).shape == (1, 2, 0, 8)
    assert sdpa(torch.randn(1, 2, 4, 8), *torch.randn(2, 1, 2, 0, 8), is_causal=True).equal(torch.zeros(1, 2, 4, 8))


def test_zeros_and_infinities_are_only_a_mask():
    mask = torch.zeros(3, 4).masked_fill(torch.eye(3, 4) == 1, -torch.inf)
    live, added = live_and_bias(mask, 3, 4, 16)
    assert added is None and live.to_dense()[0, 0].equal(mask == 0)
    assert live_and_bias(torch.zeros(3, 4), 3, 4, 16) == (None, None)


def test_a_mask_that_is_written_to_is_read_again():
    q, k, v = torch.randn(3, 1, 1, 20, 16)
    live = torch.ones(20, 20, dtype=torch.bool).tril()
    before = sdpa(q, k, v, live)
    live.numpy()[:] = True  # PyTorch's version counter does not change
    assert not sdpa(q, k, v, live).equal(before)
    torch.testing.assert_close(sdpa(q, k, v, live), F.scaled_dot_product_attention(q, k, v))


def test_the_causal_mask_is_kept_and_can_be_cleared():
    from sparseflash import scaled_dot_product

    made = scaled_dot_product.upper_left(20, 30, 16, torch.device("cpu"))
    assert scaled_dot_product.upper_left(20, 30, 16, torch.device("cpu")) is made
    sparseflash.clear_caches()
    assert scaled_dot_product.upper_left(20, 30, 16, torch.device("cpu")) is not made


def test_what_is_made_of_fake_tensors_is_not_kept():
    sparseflash.clear_caches()
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 2, 20, 16, device="meta")
        assert sdpa(q, q, q, is_causal=True).shape == q.shape
    assert type(upper_left(20, 20, 128, torch.device("meta")).indices) is torch.Tensor


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_that_is_a_fake_tensor_is_refused(dtype):
    words = "attn_mask must have contents; got a fake tensor, of torch.export or FakeTensorMode. Build masks outside."
    with FakeTensorMode(), pytest.raises(ValueError, match=words):
        sdpa(*[torch.empty(1, 2, 20, 16)] * 3, torch.empty(20, 20, dtype=dtype))


def test_what_cannot_be_is_refused_with_advice():
    q, k, v = torch.randn(3, 2, 4, 20, 16)
    for arguments, kind, words in (
        ({"attn_mask": torch.ones(20, 20, dtype=torch.bool), "is_causal": True}, ValueError, r"Pass attn_mask & masks"),
        (
            {"attn_mask": torch.ones(20, 20, dtype=torch.int64)},
            TypeError,
            "a bool or a floating point tensor; got",
        ),
        ({"attn_mask": [[True]]}, TypeError, "attn_mask must be a BlockMask, a bool .* got list"),
        ({"attn_mask": torch.ones(20, 19)}, ValueError, r"broadcast to \[B, Hq, 20, 20\]; got \[20, 19\]"),
        ({"attn_mask": torch.ones(20)}, ValueError, r"must have 2 to 4 dimensions and broadcast to .* got \[20\]"),
        ({"attn_mask": torch.ones(1, 1, 1, 20, 20)}, ValueError, r"broadcast to .* got \[1, 1, 1, 20, 20\]"),
        ({"attn_mask": torch.full((20, 20), torch.nan)}, ValueError, "finite numbers and -inf only; got NaN or"),
        ({"attn_mask": torch.full((20, 20), torch.inf)}, ValueError, "finite numbers and -inf only; got NaN or"),
        ({"attn_mask": torch.ones(20, 20, device="meta")}, ValueError, "attn_mask must hold numbers; got a tensor on"),
        ({"is_causal": 1}, TypeError, "is_causal must be True or False; got 1"),
        ({"key": k[0]}, ValueError, "must have the same number of dimensions, "),
        ({"query": torch.cat([q, q[:1]])}, ValueError, "must have the same dimensions before the heads, or 1: "),
        ({"key": k[:, :2], "value": v[:, :2]}, ValueError, "as key unless enable_gqa=True; got 4 and 2"),
        ({"value": None}, TypeError, "value must be a tensor; got NoneType"),
    ):
        with pytest.raises(kind, match=words):
            sdpa(**{"query": q, "key": k, "value": v} | arguments)


def test_it_compiles_without_a_break_unless_a_tensor_is_the_mask():
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    mask = masks.local(40, window=8, block=16)
    whole = torch.compile(lambda q, k, v: sdpa(q, k, v, mask) + sdpa(q, k, v, is_causal=True), fullgraph=True)
    torch.testing.assert_close(whole(q, k, v), sdpa(q, k, v, mask) + sdpa(q, k, v, is_causal=True))
    live = torch.rand(40, 40) < 0.5
    torch.testing.assert_close(torch.compile(sdpa)(q, k, v, live), sdpa(q, k, v, live))


@pytest.mark.parametrize("mask", [None, (1, 1, 20, 20), (3, 1, 20, 20), (20, 20), (2, 3, 1, 1, 20), (2, 1, 2, 20, 20)])
def test_any_dimensions_may_come_before_the_heads(mask):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 2, 20, 16, generator=generator, dtype=torch.float64)
    mask = None if mask is None else torch.rand(mask, generator=generator) < 0.8
    got = sdpa(q, k, v, mask, is_causal=mask is None)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
    torch.testing.assert_close(got, want)
    with pytest.raises(
        ValueError, match=r"attn_mask must broadcast to \[\*\[2, 3\], Hq, Nq, Nk\]; got \[3, 1, 2, 20, 20\]"
    ):
        sdpa(q, k, v, torch.ones(3, 1, 2, 20, 20, dtype=torch.bool))
