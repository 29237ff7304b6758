import copy
import io
import pickle
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import sparseflash
from sparseflash import BlockMask, attention, masks, scores
from sparseflash.decode import attention_with_cache
from sparseflash.nn import (
    KVCache,
    MultiheadAttention,
    Rotary,
    Rotary2D,
    SparseCrossAttention,
    SparseSelfAttention,
    rotate,
    self_attention,
)
from sparseflash.nn.rotary import plane_rates
from tests.drawn.counts import examples_times

NEAR = partial(masks.local, window=24, causal=True, block=16)
CPU = torch.device("cpu")


def filled(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


def test_it_computes_the_attention_of_its_projections():
    layer = filled(SparseSelfAttention(24, 6, NEAR, kv_heads=2, head_dim=8, rotary=Rotary(8), scale=0.4))
    x = torch.randn(2, 50, 24)
    q, k, v = layer.qkv(x).unflatten(-1, (10, 8)).transpose(1, 2).split([6, 2, 2], 1)
    rotation = Rotary(8)(torch.arange(50))
    mixed = attention(rotate(q, rotation), rotate(k, rotation), v, NEAR(50), scale=0.4)
    assert layer(x).equal(layer.out(mixed.transpose(1, 2).flatten(2)))
    assert repr(layer).startswith("SparseSelfAttention(\n  24, 6 heads of 8, kv_heads=2, mask=functools.partial(")


def test_masks_are_fixed_or_made_for_lengths_or_given_in_the_call():
    x = torch.randn(1, 40, 16)
    fixed = filled(SparseSelfAttention(16, 2, NEAR(64)))
    made = filled(SparseSelfAttention(16, 2, NEAR))
    plain = filled(SparseSelfAttention(16, 2))
    torch.testing.assert_close(fixed(x), made(x))
    torch.testing.assert_close(plain(x, mask=NEAR(40)), made(x))
    torch.testing.assert_close(plain(x, mask=NEAR), made(x))
    torch.testing.assert_close(plain(x), filled(SparseSelfAttention(16, 2, lambda n: BlockMask.dense(n)))(x))
    rule = filled(SparseSelfAttention(16, 2, lambda q, k: (k <= q) & (q - k < 24)))
    torch.testing.assert_close(rule(x), made(x))
    with pytest.raises(ValueError, match=r"mask must be for at least 70 queries and 70 keys.* it is for 64 and 64"):
        fixed(torch.randn(1, 70, 16))
    with pytest.raises(ValueError, match="pattern must return a mask of the sequence's length, 40 queries"):
        filled(SparseSelfAttention(16, 2, lambda n: NEAR(32)))(x)
    with pytest.raises(TypeError, match=r"mask must be a BlockMask, a function of a length .* got Tensor"):
        SparseSelfAttention(16, 2, torch.ones(4, 4))


def test_masks_that_were_made_are_kept_with_the_layer_and_freed_by_clear_caches():
    layer = SparseSelfAttention(16, 2, NEAR)
    assert layer.mask(40, 40, CPU) is layer.mask(40, 40, CPU)
    with torch.inference_mode():
        inferred = layer.mask(50, 50, CPU)
    assert not inferred.indices.is_inference() and layer.mask(50, 50, CPU) is inferred
    for length in range(1, 40):
        layer.mask(length, length, CPU)
    assert len(layer.mask._made) <= 16
    sparseflash.clear_caches()
    assert len(layer.mask._made) == 0


def test_masks_are_made_again_when_what_their_function_captures_changes():
    options = {"window": 9}
    layer = SparseSelfAttention(32, 2, mask=lambda n: masks.local(n, **options))
    x = torch.randn(1, 50, 32)
    for window in (9, 3):
        options["window"] = window
        torch.testing.assert_close(layer(x), layer(x, mask=masks.local(50, window=window)))


def test_padding_is_not_seen():
    layer = filled(SparseSelfAttention(16, 2, NEAR, rotary=Rotary(8)))
    x = torch.randn(2, 40, 16)
    out = layer(x, lengths=torch.tensor([40, 13]))
    torch.testing.assert_close(out[:1], layer(x[:1]))
    torch.testing.assert_close(out[1:, :13], layer(x[1:, :13]))
    torch.testing.assert_close(out[1, 13:], layer.out.bias.expand(27, -1))
    torch.testing.assert_close(out, layer(x, lengths=[40, 13]))
    cross = filled(SparseCrossAttention(16, 2, context_dim=8))
    context = torch.randn(2, 30, 8)
    out = cross(x, context, lengths=torch.tensor([5, 40]), context_lengths=torch.tensor([30, 7]))
    torch.testing.assert_close(out[0, :5], cross(x[:1], context[:1])[0, :5])
    torch.testing.assert_close(out[1:], cross(x[1:], context[1:, :7]))
    only = cross(x, context, lengths=[5, 40])
    torch.testing.assert_close(only[0, 5:], cross.out.bias.expand(35, -1))
    torch.testing.assert_close(only[1:], cross(x[1:], context[1:]))
    torch.testing.assert_close(cross(x, context, lengths=[5]), cross(x, context, lengths=[5, 5]))


def test_cross_attention_has_a_mask_of_both_lengths():
    layer = filled(SparseCrossAttention(16, 2, masks.causal))
    x, context = torch.randn(1, 10, 16), torch.randn(1, 30, 16)
    torch.testing.assert_close(layer(x, context), layer(x, context, mask=masks.causal(10, 30)))
    assert not torch.allclose(layer(x, context), layer(x, context, mask=BlockMask.dense(10, 30)))
    rule = layer(x, context, mask=lambda q, k: k <= q)
    torch.testing.assert_close(layer(x, context), rule)
    with pytest.raises(TypeError, match=r"got one that returns a mask.* lambda \*lengths:"):
        layer(x, context, mask=lambda q_len, k_len: masks.causal(q_len, k_len))
    torch.testing.assert_close(rule, layer(x, context, mask=lambda *lengths: masks.causal(*lengths)))


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    causal_mask=st.sampled_from([NEAR, masks.causal, NEAR(128), masks.causal(200, block=32)]),
    kv_heads=st.sampled_from([1, 2]),
)
@examples_times(1 / 2)
def test_tokens_in_steps_give_what_they_give_together(lengths, causal_mask, kv_heads):
    layer = filled(SparseSelfAttention(16, 2, causal_mask, kv_heads=kv_heads, rotary=Rotary(8))).eval()
    x = torch.randn(2, min(sum(lengths), 120), 16)
    cache = layer.new_cache(2, 128)
    with torch.inference_mode():
        steps = [layer(part, cache=cache) for part in x.split([n for n in cut(lengths, x.shape[1]) if n], dim=1)]
        torch.testing.assert_close(torch.cat(steps, 1), layer(x), atol=1e-5, rtol=1e-4)
    assert cache.length == x.shape[1] and cache.lengths.tolist() == [x.shape[1]] * 2


def cut(lengths, total):
    parts = []
    for n in lengths:
        parts.append(min(n, total - sum(parts)))
    return parts


def test_a_cache_is_for_causal_masks_and_inference():
    layer = filled(SparseSelfAttention(16, 2, NEAR))
    with pytest.raises(ValueError, match="mask must be causal for generation"):
        SparseSelfAttention(16, 2, partial(masks.local, window=9)).new_cache(1, 32)
    for capacity in (1, 32):
        with pytest.raises(ValueError, match=r"mask must be causal for generation, .*; got None, .*mask=masks\.causal"):
            SparseSelfAttention(16, 2).new_cache(1, capacity)
    cache = layer.new_cache(1, 32)
    with pytest.raises(ValueError, match=r"cache must be used for inference, without gradients: call layer.eval\(\)"):
        layer(torch.randn(1, 4, 16), cache=cache)
    layer.eval()
    with torch.no_grad():
        with pytest.raises(ValueError, match="cache must not be given with lengths or a mask"):
            layer(torch.randn(1, 4, 16), cache=cache, lengths=[3])
        with pytest.raises(ValueError, match="capacity must be at least 33 tokens for 33 more; the cache has"):
            layer(torch.randn(1, 33, 16), cache=cache)
        with pytest.raises(ValueError, match=r"k and v must have shape \[1, 2, N, 8\] to be added to this cache"):
            layer(torch.randn(2, 4, 16), cache=cache)
        assert layer(torch.randn(1, 0, 16), cache=cache).shape == (1, 0, 16)
        layer(torch.randn(1, 4, 16), cache=cache)
        cache.clear()
        assert cache.length == 0 and cache.lengths.tolist() == [0]
        half = layer.new_cache(1, 32, dtype=torch.bfloat16)
        assert layer(torch.randn(1, 20, 16), cache=half).dtype == torch.float32
        assert layer(torch.randn(1, 1, 16), cache=half).dtype == torch.float32
    for k, error, got in (
        ("k", TypeError, "k must be a tensor; got str"),
        (torch.ones(2), ValueError, r"k and v must have shape \[1, 2, N, 8\] to be added to this cache; got \[2\]"),
        (torch.ones(1, 2, 3, 8, dtype=torch.float64), TypeError, "k must have the cache's dtype torch.float32; got"),
        (torch.ones(1, 2, 3, 8, device="meta"), ValueError, "k must be on the cache's device cpu; it is on meta"),
    ):
        with pytest.raises(error, match=got):
            cache.append(k, torch.ones(1, 2, 3, 8))
    assert cache.length == 0
    with pytest.raises(ValueError, match=r"device must be a torch\.device or its name"):
        KVCache(1, 2, 32, 8, device="gpu")
    with torch.no_grad(), pytest.raises(TypeError, match=r"cache must be a KVCache, .*; got dict"):
        layer(torch.randn(1, 4, 16), cache={})
    for sizes, name in (((1, 2, 0, 8), "capacity"), ((1, 0, 4, 8), "kv_heads"), ((1, 2, 4, 0), "head_dim")):
        with pytest.raises(ValueError, match=f"{name} must be at least 1; got 0"):
            KVCache(*sizes)
    with pytest.raises(ValueError, match="capacity must be at least 1; got 0"):
        layer.new_cache(1, 0)
    with pytest.raises(ValueError, match=r"device must be a torch\.device or its name"):
        layer.new_cache(1, 32, device="gpu")


@pytest.mark.parametrize("backend", [None, "triton", "blockwise", "reference"])
def test_a_cache_does_not_replace_the_backend_that_was_asked_for(backend):
    layer = filled(SparseSelfAttention(32, 2, NEAR, backend=backend)).eval()
    x, cache, asked = torch.randn(1, 21, 32), layer.new_cache(1, 32), []

    def watched(function):
        def called(*arguments, backend, **others):
            asked.append((function.__name__, backend))
            return function(*arguments, backend=backend, **others)

        return called

    with (
        torch.no_grad(),
        mock.patch.object(self_attention, "attention", watched(attention)),
        mock.patch.object(self_attention, "attention_with_cache", watched(attention_with_cache)),
    ):
        steps = [layer(part, cache=cache) for part in x.split([20, 1], 1)]
    decoding = "attention" if backend == "blockwise" else "attention_with_cache"
    assert asked == [("attention", backend), (decoding, backend)]
    torch.testing.assert_close(torch.cat(steps, 1), layer(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 20])
def test_a_cache_does_not_hide_that_a_backend_cannot_run(tokens):
    with torch.no_grad():
        for backend, words in (("fast", "backend must be one of"), ("hopper", "the hopper kernels cannot serve")):
            layer = SparseSelfAttention(32, 2, NEAR, backend=backend).eval()
            with pytest.raises(ValueError, match=words):
                layer(torch.randn(1, tokens, 32), cache=layer.new_cache(1, 32))


def test_a_cache_may_be_made_in_inference_mode_and_used_outside():
    layer, x = SparseSelfAttention(16, 2, masks.causal).eval(), torch.randn(1, 20, 16)
    with torch.inference_mode():
        cache = layer.new_cache(1, 32)
        layer(x[:, :19], cache=cache)
    with torch.no_grad():
        last = layer(x[:, 19:], cache=cache)
        cache.clear()
        torch.testing.assert_close(last, layer(x, cache=cache)[:, 19:])


@pytest.mark.parametrize("tokens", [1, 20])
def test_a_call_that_fails_leaves_the_cache_as_it_was(tokens):
    layer, x = SparseSelfAttention(32, 2, NEAR).eval(), torch.randn(2, 5 + tokens, 32)
    cache = layer.new_cache(2, 32)
    with torch.no_grad():
        layer(x[:, :5], cache=cache)
        for name in ("attention", "attention_with_cache"):
            with mock.patch.object(self_attention, name, side_effect=torch.OutOfMemoryError):
                if (tokens == 1) == (name == "attention_with_cache"):
                    with pytest.raises(torch.OutOfMemoryError):
                        layer(x[:, 5:], cache=cache)
        assert cache.length == 5 and cache.lengths.tolist() == [5, 5]
        torch.testing.assert_close(layer(x[:, 5:], cache=cache), layer(x)[:, 5:], atol=1e-5, rtol=1e-4)


def test_a_call_whose_last_projection_fails_leaves_the_cache_as_it_was():
    layer, x = SparseSelfAttention(32, 2, NEAR).eval(), torch.randn(2, 6, 32)
    cache = layer.new_cache(2, 32)
    with torch.no_grad():
        layer(x[:, :5], cache=cache)
        with (
            mock.patch.object(layer.out, "forward", side_effect=torch.OutOfMemoryError),
            pytest.raises(torch.OutOfMemoryError),
        ):
            layer(x[:, 5:], cache=cache)
        assert cache.length == 5 and cache.lengths.tolist() == [5, 5]
        torch.testing.assert_close(layer(x[:, 5:], cache=cache), layer(x)[:, 5:], atol=1e-5, rtol=1e-4)


def test_a_cache_forgets_the_tokens_after_a_place():
    cache = KVCache(2, 2, 32, 8)
    k, v = torch.randn(2, 2, 2, 9, 8)
    cache.append(k, v)
    cache.truncate(4)
    assert cache.length == 4 and cache.lengths.tolist() == [4, 4]
    cache.append(k[:, :, 4:], v[:, :, 4:])
    assert torch.equal(cache.k[:, :, :9], k) and torch.equal(cache.v[:, :, :9], v)
    for wrong in (10, -1):
        with pytest.raises(ValueError, match=f"length must be from 0 to the cache's 9 tokens; got {wrong}"):
            cache.truncate(wrong)


def test_a_cache_is_for_as_many_sequences_as_the_mask():
    three = BlockMask.from_dense(torch.ones(3, 1, 32, 32, dtype=torch.bool).tril(), block=16)
    layer = SparseSelfAttention(16, 2, three).eval()
    words = "mask must be for one sequence or for 2, as the cache is; got one for 3"
    with pytest.raises(ValueError, match=words):
        layer.new_cache(2, 32)
    with torch.no_grad(), pytest.raises(ValueError, match=words):
        layer(torch.randn(2, 1, 16), cache=KVCache(2, 2, 32, 8))
    layer.new_cache(3, 32)


@pytest.mark.parametrize("heads", [2, 3])
def test_a_cache_is_for_as_many_heads_as_the_mask(heads):
    """Up to 16 tokens, a mask for each key head could be decoded, but no longer prompt."""
    layer = SparseSelfAttention(16, 4, masks.per_head([masks.causal(32)] * heads), kv_heads=2).eval()
    words = f"mask must be for one head or for the layer's 4; got one for {heads}"
    with pytest.raises(ValueError, match=words):
        layer.new_cache(1, 32)
    with torch.no_grad(), pytest.raises(ValueError, match=words):
        layer(torch.randn(1, 1, 16), cache=KVCache(1, 2, 32, 4))
    SparseSelfAttention(16, 4, masks.per_head([masks.causal(32)] * 4), kv_heads=2).new_cache(1, 32)


def test_the_length_of_a_cache_may_be_set():
    """The next tokens have their places after it."""
    cache, k = KVCache(2, 2, 32, 8), torch.randn(2, 2, 9, 8)
    cache.append(k, k)
    cache.length = 4
    assert cache.lengths.tolist() == [4, 4]
    cache.append(k[:, :, :2], -k[:, :, :2])
    assert cache.length == 6 and cache.lengths.tolist() == [6, 6]
    assert torch.equal(cache.k[:, :, :6], torch.cat([k[:, :, :4], k[:, :, :2]], 2))
    assert torch.equal(cache.v[:, :, 4:6], -k[:, :, :2])


def test_a_cache_is_no_part_of_an_autograd_graph():
    cache, k = KVCache(1, 2, 32, 8), torch.randn(1, 2, 3, 8)
    for pair in ((k.clone().requires_grad_(), k), (k, k.clone().requires_grad_())):
        with pytest.raises(ValueError, match=r"k and v must not require gradients: a cache .* under torch\.no_grad"):
            cache.append(*pair)
        with torch.no_grad():
            cache.append(*pair)
    cache.append(k.clone().requires_grad_().detach(), k)
    assert cache.length == 9 and not cache.k.requires_grad and not cache.v.requires_grad


@pytest.mark.parametrize(
    ("positions", "error", "words"),
    [
        (torch.arange(4) + 0j, TypeError, r"positions must be real numbers; got torch\.complex64"),
        (torch.ones(4, dtype=torch.bool), TypeError, r"positions must be real numbers; got torch\.bool"),
        (torch.arange(4).to_sparse(), TypeError, "positions must be a dense tensor; got one with the layout"),
    ],
)
def test_positions_are_real_numbers(positions, error, words):
    for rotary in (Rotary(8), Rotary2D(8, width=2)):
        with pytest.raises(error, match=words):
            rotary(positions)


def test_rotary_angles_of_far_positions_are_exact():
    """An angle in fp32 at position 16,905,217 would be off by 1."""
    positions = torch.tensor([3, 16_905_216, 16_905_217, 2**31 - 258])
    for rotation, rates in (
        (Rotary(8)(positions), 10_000.0 ** -(torch.arange(4) / 4)),
        (Rotary2D(16, width=1)(positions), plane_rates(16)),
    ):
        angles = positions.double()[:, None] * rates.double()
        assert rotation.dtype == torch.float32
        (cosine, minus), (sine, other) = rotation[0, 0, ..., :4].double().permute(1, 2, 0, 3)
        torch.testing.assert_close(cosine, angles.cos(), atol=1e-7, rtol=0)
        torch.testing.assert_close(sine, angles.sin(), atol=1e-7, rtol=0)
        assert torch.equal(other, cosine) and torch.equal(minus, -sine)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_pair_of_features_is_rotated_by_their_angle(dtype):
    x, rotation = torch.randn(2, 3, 50, 8, dtype=dtype), Rotary(8)(torch.arange(50))
    cosine, sine = rotation[..., 0, 0, :], rotation[..., 1, 0, :]
    first, second = x.to(torch.promote_types(dtype, torch.float32)).chunk(2, -1)
    want = torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1).to(dtype)
    for heads in (x, x.transpose(1, 2).contiguous().transpose(1, 2), x.expand(2, 3, 50, 8)[:, 1:]):
        assert torch.equal(rotate(heads, rotation), want[:, -heads.shape[1] :])
    with pytest.raises(TypeError, match="rotation must be what Rotary or Rotary2D returns; got tuple"):
        rotate(x, (cosine, sine))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gradient_of_a_rotation_is_rounded_once(dtype):
    x, dout = (torch.randn(2, 3, 50, 8, dtype=dtype) for _ in range(2))
    rotation = Rotary(8)(torch.arange(50))
    (found,), (want,) = (
        torch.autograd.grad(rotate(y, rotation), y, dout.to(y.dtype))
        for y in (x.requires_grad_(), x.detach().float().requires_grad_())
    )
    assert torch.equal(found, want.to(dtype))


def test_what_rotary_angles_are_made_of_is_finite():
    for base in ("10000", float("inf"), float("nan"), 0, True):
        with pytest.raises(ValueError, match="base must be a positive number; got"):
            Rotary(8, base=base)
    for wavelengths in (3.0, ("1", "2"), (1.0, float("inf")), (0.0, 1.0), (2.0, 1.0), (1.0,), (1.0, float("nan"))):
        with pytest.raises(ValueError, match="wavelengths must be two positive numbers, the shorter one first; got"):
            Rotary2D(8, width=2, wavelengths=wavelengths)


def test_a_cache_has_a_dtype_that_attention_takes():
    layer = SparseSelfAttention(16, 2, NEAR)
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.complex64, "half"):
        with pytest.raises(TypeError, match=r"dtype must be fp16, bf16, fp32 or fp64; got (torch\.\w+|'half')"):
            layer.new_cache(1, 32, dtype=dtype)


def test_a_mask_that_was_moved_under_a_fake_mode_is_not_kept():
    layer, meta = SparseSelfAttention(16, 2, NEAR), torch.device("meta")
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer.mask(32, 32, meta)
    assert type(layer.mask(32, 32, meta).indices) is torch.Tensor


def test_a_cache_is_not_for_a_mask_with_lengths():
    layer = SparseSelfAttention(16, 2, masks.causal(32).with_lengths([20])).eval()
    with pytest.raises(ValueError, match=r"mask must have no lengths of its own for generation, .*; got some"):
        layer.new_cache(1, 32)
    with torch.no_grad(), pytest.raises(ValueError, match="mask must have no lengths of its own for generation"):
        layer(torch.randn(1, 20, 16), cache=KVCache(1, 2, 32, 8))


@pytest.mark.parametrize("tokens", [0, 1, 20])
@pytest.mark.parametrize("mask", [None, partial(masks.local, window=9), masks.local(32, window=9)])
def test_a_cache_made_by_hand_is_for_causal_masks_too(mask, tokens):
    layer, cache = SparseSelfAttention(16, 2, mask).eval(), KVCache(1, 2, 32, 8)
    with torch.no_grad(), pytest.raises(ValueError, match="mask must be causal for generation"):
        layer(torch.randn(1, tokens, 16), cache=cache)
    assert cache.length == 0
    layer, x = SparseSelfAttention(16, 2, masks.causal).eval(), torch.randn(1, 20, 16)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, cache=cache), layer(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((16, 3), "embed_dim must be a multiple of num_heads unless head_dim is given; got 16 and 3"),
        ((0, 2), "embed_dim must be at least 1; got 0"),
        ((16, 2, None, {"kv_heads": 3}), "num_heads must be a multiple of kv_heads; got 2 and 3"),
        ((16, 2, None, {"dropout": 1.0}), "dropout must be at least 0 and below 1; got 1.0"),
        ((16, 2, None, {"rotary": Rotary(16)}), "rotary must be for heads of 8 features; it is for 16"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments, words):
    named = arguments[3] if len(arguments) > 3 else {}
    with pytest.raises(ValueError, match=words):
        SparseSelfAttention(*arguments[:3], **named)


@pytest.mark.parametrize("kind", [SparseSelfAttention, SparseCrossAttention, MultiheadAttention])
def test_weights_are_made_on_the_device_and_in_the_dtype(kind):
    layer = kind(16, 2, mask=NEAR, device="meta", dtype=torch.bfloat16)
    weights = [*layer.parameters(), *layer.buffers()]
    assert len(weights) >= 4 and {(x.device.type, x.dtype) for x in weights} == {("meta", torch.bfloat16)}


@pytest.mark.parametrize("kind", [SparseSelfAttention, SparseCrossAttention, MultiheadAttention])
def test_flags_are_true_or_false(kind):
    with pytest.raises(TypeError, match="bias must be True or False; got 'no'"):
        kind(16, 2, bias="no")


CALLS = {
    "x": lambda x, other, **made: SparseSelfAttention(16, 2, **made)(x),
    "x of a query": lambda x, other, **made: SparseCrossAttention(16, 2, **made)(x, other),
    "context": lambda x, other, **made: SparseCrossAttention(16, 2, **made)(other, x),
    "query": lambda x, other, **made: MultiheadAttention(16, 2, **made)(x, other, other),
    "key": lambda x, other, **made: MultiheadAttention(16, 2, kdim=16, **made)(other, x, other),
    "value": lambda x, other, **made: MultiheadAttention(16, 2, bias=False, **made)(other, other, x),
}
X = torch.randn(2, 10, 16)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("x", "made", "error", "words"),
    [
        (X.half(), {}, TypeError, "have the dtype of the layer's weights, torch.float32; got torch.float16"),
        (X.double(), {}, TypeError, "have the dtype of the layer's weights, torch.float32; got torch.float64"),
        (X.long(), {}, TypeError, "have the dtype of the layer's weights, torch.float32; got torch.int64"),
        (X.to(torch.complex64), {}, TypeError, "have the dtype of the layer's weights, torch.float32; got torch.compl"),
        (X.to("meta"), {}, ValueError, "be on the device of the layer's weights, cpu; it is on meta"),
        (X.to_sparse(), {}, TypeError, "be a dense tensor; got one with the layout torch.sparse_coo"),
        (X.flatten(0, 1).to_sparse_csr(), {}, TypeError, "be a dense tensor; got one with the layout torch.sparse_csr"),
        (
            torch.nested.nested_tensor(list(X), layout=torch.jagged),
            {},
            TypeError,
            r"be a plain tensor; got a nested one\. Pad it, with (lengths|context_lengths|key_padding_mask)",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_inputs_that_do_not_fit_the_weights_are_refused(name, x, made, error, words):
    with pytest.raises(error, match=f"^{name.split()[0]} must {words}"):
        CALLS[name](x, X, **made)


@pytest.mark.parametrize("name", CALLS)
def test_weights_on_another_device_than_the_inputs_are_refused(name):
    with pytest.raises(ValueError, match=r" must be on the device of the layer's weights, meta; it is on cpu\."):
        CALLS[name](X, X, device="meta")


@pytest.mark.parametrize("name", CALLS)
def test_autocast_makes_inputs_fit_that_it_casts(name):
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            for other in (torch.float16, torch.float32):
                out = CALLS[name](X.to(dtype), X.to(other))
                assert (out[0] if isinstance(out, tuple) else out).dtype == torch.bfloat16
        for dtype in (torch.float64, torch.int64):  # dtypes that it does not cast
            with pytest.raises(TypeError, match="must have the dtype of the layer's weights under autocast, torch"):
                CALLS[name](X.to(dtype), X)
        with pytest.raises(ValueError, match="must be on the device of the layer's weights, cpu; it is on meta"):
            CALLS[name](X.to("meta"), X)


class Casting(torch.nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside, self.weight = inside.double(), inside.weight

    def forward(self, x):
        return self.inside(x.double()).float()


def casting_hook(linear):
    linear.double().register_forward_pre_hook(lambda module, given: (given[0].double(),))
    linear.register_forward_hook(lambda module, given, out: out.float())
    return linear


def casting_forward(linear):
    forward = linear.double().forward
    linear.forward = lambda x: forward(x.double()).float()
    return linear


@pytest.mark.parametrize("cast", [Casting, casting_hook, casting_forward])
def test_projections_that_cast_their_input_are_left_to_it(cast):
    layer, cross = filled(SparseSelfAttention(16, 2)), filled(SparseCrossAttention(16, 2))
    expected = layer(X), cross(X, X)
    layer.qkv, cross.q, cross.kv = cast(layer.qkv), cast(cross.q), cast(cross.kv)
    torch.testing.assert_close((layer(X), cross(X, X)), expected)


def test_inputs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="positions must be on x's device cpu; they are on meta"):
        SparseSelfAttention(16, 2, rotary=Rotary(8))(X, positions=torch.arange(10, device="meta"))
    with pytest.raises(TypeError, match=r"rotary must be Rotary, Rotary2D or None; got bool"):
        SparseSelfAttention(16, 2, rotary=True)
    for shape in ((1,), (5,), (1, 2), (2, 4)):
        with pytest.raises(ValueError, match=rf"positions must have shape \[4\] or \[3, 4\]; got \[{shape[0]}"):
            SparseSelfAttention(16, 2, rotary=Rotary(8))(torch.randn(3, 4, 16), positions=torch.zeros(shape))
    with pytest.raises(ValueError, match="context_dim must be at least 1; got 0"):
        SparseCrossAttention(16, 2, context_dim=0)
    layer = SparseSelfAttention(16, 2)
    with pytest.raises(ValueError, match=r"x must have shape \[batch, tokens, 16\]; got \[3, 16\]"):
        layer(torch.randn(3, 16))
    with pytest.raises(TypeError, match="x must be a tensor; got list"):
        layer([1.0])
    with pytest.raises(ValueError, match=r"context must have shape \[batch, tokens, 8\]; got \[1, 3, 16\]"):
        SparseCrossAttention(16, 2, context_dim=8)(torch.randn(1, 3, 16), torch.randn(1, 3, 16))


def test_dropout_is_for_training_and_follows_the_seed():
    layer, x = SparseSelfAttention(16, 2, dropout=0.5), torch.randn(1, 40, 16)
    torch.manual_seed(3)
    first = layer(x)
    torch.manual_seed(3)
    assert layer(x).equal(first)
    assert not layer.eval()(x).equal(first)


def test_state_dict_copies_and_pickles_hold_weights_and_the_rule_of_the_mask():
    layer = filled(SparseSelfAttention(16, 2, NEAR, rotary=Rotary(8)))
    x = torch.randn(1, 40, 16)
    expected = layer(x)
    assert set(layer.state_dict()) == {"qkv.weight", "qkv.bias", "out.weight", "out.bias"}
    other = SparseSelfAttention(16, 2, NEAR, rotary=Rotary(8))
    other.load_state_dict(layer.state_dict())
    assert other(x).equal(expected)
    copied = copy.deepcopy(layer)
    assert copied(x).equal(expected) and copied.mask._made is not layer.mask._made
    assert pickle.loads(pickle.dumps(layer))(x).equal(expected)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.load(file, weights_only=False)(x).equal(expected)


def test_autocast_and_half_precision():
    layer, x = SparseSelfAttention(64, 2, NEAR, rotary=Rotary(32)), torch.randn(1, 400, 64)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(x)
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.float(), layer(x), atol=0.05, rtol=0.05)
    half = copy.deepcopy(layer).bfloat16()
    out = half(x.bfloat16())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), layer(x), atol=0.05, rtol=0.05)


def test_it_compiles_whole_with_gradients_and_lengths():
    layer = filled(SparseSelfAttention(32, 2, NEAR, kv_heads=1, rotary=Rotary(16)))
    torch.manual_seed(0)
    x, lengths = torch.randn(2, 40, 32, requires_grad=True), torch.tensor([40, 17])
    expected = layer(x, lengths=lengths)
    wanted = torch.autograd.grad(expected.square().mean(), [x, *layer.parameters()])
    out = torch.compile(layer, fullgraph=True)(x, lengths=lengths)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    for a, b in zip(torch.autograd.grad(out.square().mean(), [x, *layer.parameters()]), wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    fixed = filled(SparseCrossAttention(32, 2, masks.local(40, 60, window=16, block=16)))
    context = torch.randn(2, 60, 32)
    torch.testing.assert_close(
        torch.compile(fixed, fullgraph=True, backend="aot_eager")(x, context), fixed(x, context), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("mask", [NEAR, NEAR(40), None])
def test_it_exports(mask):
    layer = filled(SparseSelfAttention(32, 2, mask, rotary=Rotary(16))).eval()
    x = torch.randn(2, 40, 32)
    exported = torch.export.export(layer, (x,))
    torch.testing.assert_close(exported.module()(x), layer(x))


@pytest.mark.parametrize("bias", [True, False])
def test_weights_come_from_multihead_attention(bias):
    theirs = filled(torch.nn.MultiheadAttention(16, 2, dropout=0.1, bias=bias, batch_first=True)).double().eval()
    x, context = torch.randn(2, 10, 16).double(), torch.randn(2, 30, 16).double()
    ours = SparseSelfAttention.from_multihead(theirs)
    assert not ours.training and ours.dropout == 0.1
    torch.testing.assert_close(ours(x), theirs(x, x, x)[0])
    torch.testing.assert_close(
        SparseSelfAttention.from_multihead(theirs, masks.causal)(x),
        theirs(x, x, x, attn_mask=~masks.causal(10).to_dense()[0, 0])[0],
    )
    torch.testing.assert_close(SparseCrossAttention.from_multihead(theirs)(x, context), theirs(x, context, context)[0])
    narrow = filled(torch.nn.MultiheadAttention(16, 2, kdim=8, vdim=8, bias=bias, batch_first=True)).double()
    torch.testing.assert_close(
        SparseCrossAttention.from_multihead(narrow)(x, context[..., :8]),
        narrow(x, context[..., :8], context[..., :8])[0],
    )


@pytest.mark.parametrize(
    "frozen", ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias", "q_proj_weight"]
)
def test_frozen_weights_of_multihead_attention_stay_frozen(frozen):
    widths = {"kdim": 8, "vdim": 8} if frozen == "q_proj_weight" else {}
    theirs = torch.nn.MultiheadAttention(16, 2, batch_first=True, **widths)
    theirs.get_parameter(frozen).requires_grad_(False)
    of_ours = {
        "in_proj_weight": ["q.weight", "kv.weight"], "in_proj_bias": ["q.bias", "kv.bias"],
        "out_proj.weight": ["out.weight"], "out_proj.bias": ["out.bias"], "q_proj_weight": ["q.weight"],
    }  # fmt: skip

    def fixed(layer):
        return [name for name, x in layer.named_parameters() if not x.requires_grad]

    assert fixed(SparseCrossAttention.from_multihead(theirs)) == of_ours[frozen]
    assert fixed(MultiheadAttention.from_multihead(theirs)) == [frozen]
    if not widths:
        wanted = [name.replace("q.", "qkv.") for name in of_ours[frozen] if not name.startswith("kv.")]
        assert fixed(SparseSelfAttention.from_multihead(theirs)) == wanted


def test_weights_that_do_not_fit_are_refused():
    for made, words in (
        (torch.nn.MultiheadAttention(16, 2, add_bias_kv=True), "add_bias_kv and add_zero_attn must be False"),
        (torch.nn.MultiheadAttention(16, 2, add_zero_attn=True), "add_bias_kv and add_zero_attn must be False"),
        (torch.nn.MultiheadAttention(16, 2, kdim=8, vdim=8), "must have queries, keys and values of one width; got"),
    ):
        with pytest.raises(ValueError, match=words):
            SparseSelfAttention.from_multihead(made)
    with pytest.raises(ValueError, match="must have keys and values of one width; got embed_dim=16, kdim=8 and vdim=4"):
        SparseCrossAttention.from_multihead(torch.nn.MultiheadAttention(16, 2, kdim=8, vdim=4))
    with pytest.raises(TypeError, match=r"module must be a torch.nn.MultiheadAttention; got Linear"):
        SparseSelfAttention.from_multihead(torch.nn.Linear(2, 2))


@given(shift=st.integers(0, 10_000))
def test_products_depend_on_distances_alone(shift):
    q, k = torch.randn(2, 1, 1, 30, 16, dtype=torch.float64)
    rotary, places = Rotary(16), torch.arange(30)
    products = rotate(q, rotary(places)) @ rotate(k, rotary(places)).mT
    shifted = rotate(q, rotary(places + shift)) @ rotate(k, rotary(places + shift)).mT
    torch.testing.assert_close(products, shifted, atol=0.02, rtol=0)


def test_positions_of_an_image_are_rows_and_columns():
    q, k = (x.expand(1, 1, 64, 16) for x in torch.randn(2, 1, 1, 1, 16))
    rotation = Rotary2D(16, width=8)(torch.arange(64))
    products = (rotate(q, rotation) @ rotate(k, rotation).mT)[0, 0].view(8, 8, 8, 8)
    torch.testing.assert_close(products[2, 3, 1, 5], products[4, 1, 3, 3])
    assert not torch.allclose(products[2, 3, 1, 5], products[2, 3, 2, 5])
    shifted = Rotary2D(16, width=8, first=1)(torch.arange(65))
    torch.testing.assert_close(shifted[:, :, 1:], rotation)
    torch.testing.assert_close(shifted[:, :, 0], rotation[:, :, 0])


def test_own_positions_of_a_batch():
    layer = filled(SparseSelfAttention(16, 2, rotary=Rotary(8)))
    x, places = torch.randn(2, 20, 16), torch.stack([torch.arange(20), torch.arange(20).flip(0)])
    out = layer(x, positions=places)
    torch.testing.assert_close(out[:1], layer(x[:1]))
    torch.testing.assert_close(out[1:], layer(x[1:], positions=places[1]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rotary(7), "head_dim must be a positive multiple of 2 for rotary positions; got 7"),
        (lambda: Rotary(8, base=0.0), "base must be a positive number; got 0.0"),
        (lambda: Rotary2D(6, 8), "head_dim must be a positive multiple of 4 for rotary positions; got 6"),
        (lambda: Rotary2D(8, 0), "width must be at least 1 and first at least 0; got 0 and 0"),
        (
            lambda: Rotary2D(8, 4, wavelengths=(9, 3)),
            r"wavelengths must be two positive numbers, the shorter one first; got",
        ),
        (lambda: Rotary(8)(torch.zeros(1, 2, 3)), r"positions must be a tensor of shape \[N\] or \[B, N\]; got \[1, 2"),
        (lambda: rotate(torch.ones(1, 1, 2, 4), Rotary(8)(torch.arange(2))), "x must have the head dim .* 8; got 4"),
    ],
)
def test_rotary_positions_that_cannot_be_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("tokens", [1, 20])
def test_score_modifications_with_a_cache_are_those_without(tokens):
    layer = filled(SparseSelfAttention(64, 4, masks.causal, kv_heads=2, dtype=torch.float64)).eval()
    changes = scores.alibi(torch.rand(4, dtype=torch.float64)) + scores.softcap(2.0)
    changes = changes + scores.sink(torch.randn(4, dtype=torch.float64))
    x = torch.randn(2, 60, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, cache = layer(x, scores=changes), layer.new_cache(2, 100)
        found = torch.cat([layer(part, cache=cache, scores=changes) for part in x.split(tokens, 1)], 1)
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)
        assert not torch.allclose(whole, layer(x))


def test_cross_attention_takes_score_modifications_with_gradients():
    layer = filled(SparseCrossAttention(64, 4, dtype=torch.float64))
    x, context = (torch.randn(2, n, 64, dtype=torch.float64) for n in (10, 30))
    slopes = torch.rand(4, dtype=torch.float64, requires_grad=True)
    out = layer(x, context, scores=scores.alibi(slopes))
    q, (k, v) = layer.q(x), layer.kv(context).chunk(2, -1)
    q, k, v = (each.unflatten(-1, (4, 16)).transpose(1, 2) for each in (q, k, v))
    far = (torch.arange(10).view(-1, 1) + 20 - torch.arange(30)).abs()
    weights = (q @ k.mT / 4 - slopes.view(-1, 1, 1) * far).softmax(-1)
    want = layer.out((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)
    got, true = (torch.autograd.grad(each.sum(), slopes)[0] for each in (out, want))
    torch.testing.assert_close(got, true, rtol=1e-9, atol=1e-9)
