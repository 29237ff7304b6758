import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash.interop import xformers_bias
from sparseflash.interop.xformers import _KINDS, mask_of_bias, memory_efficient_attention


def band(q_len, k_len, at_bottom, left=None, right=None):
    """From `p - left` to `p + right`, with p = i, or as far from the last key as i is from the last query."""
    at = torch.arange(q_len)[:, None] + (k_len - q_len if at_bottom else 0)
    key = torch.arange(k_len)
    live = torch.ones(q_len, k_len, dtype=torch.bool)
    live &= key >= at - left if left is not None else live
    return live & (key <= at + right) if right is not None else live


# From the class's documentation, for window_left = 4, window_right = 2, _window_size = 5.
RULES = {
    "LowerTriangularMask": (False, None, 0),
    "LowerTriangularMaskWithTensorBias": (False, None, 0),
    "LowerTriangularFromBottomRightMask": (True, None, 0),
    "LowerTriangularFromBottomRightLocalAttentionMask": (True, 4, 0),
    "LocalAttentionFromBottomRightMask": (True, 4, 2),
    "BlockDiagonalMask": (False,),
    "BlockDiagonalCausalMask": (False, None, 0),
    "BlockDiagonalCausalFromBottomRightMask": (True, None, 0),
    "BlockDiagonalCausalLocalAttentionMask": (False, 4, 0),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (True, 4, 0),
    "BlockDiagonalPaddedKeysMask": (False,),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (True, None, 0),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (True, 4, 2),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (True, 4, 0),
    "BlockDiagonalGappyKeysMask": (False,),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (True, None, 0),
}


def starts(sizes):
    return [0, *torch.tensor(sizes, dtype=torch.int64).cumsum(0).tolist()]


def bias_of(name, q_sizes, k_sizes, room):
    """An object of a class of this name, with xformers' attributes; keys that may have gaps lie in blocks of `room`."""
    bias = type(name, (), {})()
    if "Block" in name:
        gaps = "Padded" in name or "Gappy" in name
        k_starts = [room * n for n in range(len(k_sizes) + 1)] if gaps else starts(k_sizes)
        bias.q_seqinfo = SimpleNamespace(seqstart_py=starts(q_sizes))
        bias.k_seqinfo = SimpleNamespace(seqstart_py=k_starts)
        if gaps:
            bias.k_seqinfo.seqlen_py = k_sizes
    if len(RULES[name]) == 3 and RULES[name][2] == 2:
        bias.window_left, bias.window_right = 4, 2
    elif len(RULES[name]) == 3 and RULES[name][1] == 4:
        bias._window_size = 5
    return bias


def test_every_class_has_a_rule():
    assert set(RULES) == set(_KINDS)


@given(
    name=st.sampled_from(sorted(RULES)),
    sizes=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=4),
    more=st.integers(0, 9),
)
@example(name="BlockDiagonalCausalWithOffsetPaddedKeysMask", sizes=[(3, 7), (0, 2), (4, 0)], more=3)
def test_the_masks_are_the_documented_rules(name, sizes, more):
    blocks = "Block" in name
    sizes = sizes if blocks else [(max(sizes[0][0], 1), max(sizes[0][1], 1))]
    q_sizes, k_sizes = map(list, zip(*sizes))
    room = max(k_sizes) + more
    bias = bias_of(name, q_sizes, k_sizes, room)
    k_starts = bias.k_seqinfo.seqstart_py if blocks else starts(k_sizes)
    q_len, k_len = sum(q_sizes), k_starts[-1]
    if not (q_len and k_len):
        return
    want = torch.zeros(q_len, k_len, dtype=torch.bool)
    for (q_size, k_size), q, k in zip(sizes, starts(q_sizes), k_starts):
        want[q : q + q_size, k : k + k_size] = band(q_size, k_size, *RULES[name])
    mask = mask_of_bias(bias, q_len, k_len, block=16)
    assert torch.equal(mask.to_dense()[0, 0], want)
    assert mask_of_bias(bias_of(name, q_sizes, k_sizes, room), q_len, k_len, block=16) is mask


def own_bias(name, q_sizes, k_sizes, room):
    kind = getattr(xformers_bias, name)
    if name.startswith("LocalAttention"):
        return kind(4, 2)
    if name == "LowerTriangularMaskWithTensorBias":
        return xformers_bias.LowerTriangularMask().add_bias(torch.zeros(1))
    if name == "LowerTriangularFromBottomRightLocalAttentionMask":
        return xformers_bias.LowerTriangularFromBottomRightMask().make_local_attention(5)
    if "Block" not in name:
        return kind()
    if "Padded" in name:
        if "CausalLocal" in name:
            return kind.from_seqlens_local(q_sizes, room, k_sizes, 5)
        padded = xformers_bias.BlockDiagonalPaddedKeysMask.from_seqlens(q_sizes, room, k_sizes)
        return padded.make_local_attention(4, 2) if "Local" in name else kind.from_seqlens(q_sizes, room, k_sizes)
    if "Gappy" in name:
        return kind.from_seqlens(q_sizes, [room * n for n in range(len(k_sizes) + 1)], k_sizes)
    packed = xformers_bias.BlockDiagonalMask.from_seqlens(q_sizes, k_sizes)
    end = "_from_bottomright" if "BottomRight" in name else ""
    if "Local" in name:
        return getattr(packed, f"make_local_attention{end}")(5)
    return getattr(packed, f"make_causal{end}")() if "Causal" in name else packed


@given(
    name=st.sampled_from(sorted(RULES)),
    sizes=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=4),
    more=st.integers(0, 9),
)
def test_our_own_classes_are_the_same_masks(name, sizes, more):
    sizes = sizes if "Block" in name else [(max(sizes[0][0], 1), sizes[0][1])]
    q_sizes, k_sizes = map(list, zip(*sizes))
    room = max(k_sizes) + more
    bias, own = (make(name, q_sizes, k_sizes, room) for make in (bias_of, own_bias))
    gaps = "Padded" in name or "Gappy" in name
    q_len, k_len = sum(q_sizes), room * len(k_sizes) if gaps else sum(k_sizes)
    assert type(own).__name__ == name
    if q_len:
        assert mask_of_bias(own, q_len, k_len, block=16) == mask_of_bias(bias, q_len, k_len, block=16)


def test_lists_of_sequences_are_packed_and_split():
    sequences = drawn((2, 5, 3, 16), (1, 9, 3, 16))
    bias, x = xformers_bias.BlockDiagonalMask.from_tensor_list(sequences)
    causal = bias.make_causal()
    parts = causal.split(memory_efficient_attention(x, x, x, causal, block=16))
    for got, own in zip(parts, sequences, strict=True):
        dead = torch.ones(own.shape[1], own.shape[1], dtype=torch.bool).triu(1)
        same(got, defined(own, own, own, torch.zeros(dead.shape).masked_fill(dead, -torch.inf)), [own])
    lengths = xformers_bias.BlockDiagonalMask.from_seqlens([4, 15])
    assert [part.shape[1] for part in lengths.split(x)] == [4, 15]


def test_our_own_triangle_takes_a_tensor():
    q, k, v, bias = drawn((1, 20, 2, 16), (1, 20, 2, 16), (1, 20, 2, 16), (1, 2, 20, 20))
    dead = torch.ones(20, 20, dtype=torch.bool).triu(1)
    own = xformers_bias.LowerTriangularMask().add_bias(bias)
    same(
        memory_efficient_attention(q, k, v, own), defined(q, k, v, bias.masked_fill(dead, -torch.inf)), [q, k, v, bias]
    )


def theirs():
    biases = pytest.importorskip("xformers.ops.fmha.attn_bias", reason="xformers is not installed")
    blocks = {"q_seqlen": [5, 3, 20], "kv_seqlen": [9, 3, 24]}
    padded, gappy = {**blocks, "kv_padding": 30}, {**blocks, "kv_seqstarts": [0, 12, 20, 60]}
    gappy["kv_seqlen"] = [9, 3, 24]
    diagonal = biases.BlockDiagonalMask.from_seqlens(**blocks)
    by_padding = biases.BlockDiagonalPaddedKeysMask.from_seqlens(**padded)
    return [
        (biases.LowerTriangularMask(), 30, 20),
        (biases.LowerTriangularFromBottomRightMask(), 20, 30),
        (biases.LowerTriangularFromBottomRightMask().make_local_attention(7), 20, 30),
        (biases.LocalAttentionFromBottomRightMask(window_left=3, window_right=5), 20, 30),
        (diagonal, 28, 36),
        (diagonal.make_causal(), 28, 36),
        (diagonal.make_causal_from_bottomright(), 28, 36),
        (diagonal.make_local_attention(7), 28, 36),
        (diagonal.make_local_attention_from_bottomright(7), 28, 36),
        (by_padding, 28, 90),
        (by_padding.make_local_attention(4, 2), 28, 90),
        (biases.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(**padded), 28, 90),
        (biases.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(**padded, window_size=6), 28, 90),
        (biases.BlockDiagonalGappyKeysMask.from_seqlens(**gappy), 28, 60),
        (biases.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(**gappy), 28, 60),
    ]


def test_the_masks_are_those_that_xformers_materializes():
    seen = set()
    for bias, q_len, k_len in theirs():
        want = bias.materialize((q_len, k_len)) == 0
        assert torch.equal(mask_of_bias(bias, q_len, k_len, block=16).to_dense()[0, 0], want), type(bias).__name__
        seen.add(type(bias).__name__)
    assert seen == set(_KINDS) - {"LowerTriangularMaskWithTensorBias"}


def test_pages_of_xformers_are_refused():
    biases = pytest.importorskip("xformers.ops.fmha.attn_bias", reason="xformers is not installed")
    padded = biases.BlockDiagonalPaddedKeysMask.from_seqlens(q_seqlen=[1, 1], kv_padding=32, kv_seqlen=[9, 3])
    paged = padded.make_paged(
        torch.arange(4).view(2, 2), page_size=16, paged_type=biases.PagedBlockDiagonalPaddedKeysMask
    )
    with pytest.raises(TypeError, match="Pages go to attention_with_cache"):
        mask_of_bias(paged, 2, 64)


def drawn(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def defined(q, k, v, bias=0.0, scale=None):
    """The PyTorch code of xformers' documentation, `[B, M, H, K]`; queries without keys give 0."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = (q.transpose(1, 2) * scale) @ k.transpose(1, 2).mT + bias
    none = (s == -torch.inf).all(-1, keepdim=True)
    return (s.masked_fill(none, 0.0).softmax(-1).masked_fill(none, 0.0) @ v.transpose(1, 2)).transpose(1, 2)


def same(ours, theirs, inputs):
    torch.testing.assert_close(ours, theirs)
    dout = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=ours.dtype)
    got, want = (torch.autograd.grad(x, inputs, dout, retain_graph=True) for x in (ours, theirs))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_layouts_of_three_four_and_five_dimensions():
    q, k, v = drawn((2, 20, 3, 16), (2, 30, 3, 16), (2, 30, 3, 8))
    same(memory_efficient_attention(q, k, v, scale=0.3), defined(q, k, v, scale=0.3), [q, k, v])
    one = [x[:, :, 0] for x in (q, k, v)]
    same(memory_efficient_attention(*one), defined(q[:, :, :1], k[:, :, :1], v[:, :, :1])[:, :, 0], [q, k, v])
    q, k, v = drawn((2, 20, 2, 4, 16), (2, 30, 2, 1, 16), (2, 30, 2, 1, 16))
    expanded = [x.expand(-1, -1, -1, 4, -1) for x in (k, v)]
    want = defined(*(x.flatten(2, 3) for x in (q, *expanded))).unflatten(2, (2, 4))
    same(memory_efficient_attention(q, *expanded), want, [q, k, v])
    own = [x + 0 for x in expanded]  # the same without strides of 0
    same(memory_efficient_attention(q, *own), want, [q, k, v])


def test_tensors_are_added_and_minus_infinity_is_dead():
    q, k, v, bias = drawn((2, 20, 3, 16), (2, 30, 3, 16), (2, 30, 3, 16), (2, 3, 20, 30))
    dead = bias.masked_fill(bias > 0.5, -torch.inf)
    same(memory_efficient_attention(q, k, v, dead, block=16), defined(q, k, v, dead), [q, k, v, bias])
    of_three, own = [x[:, :, 0] for x in (q, k, v)], bias[:, 0]
    want = defined(q[:, :, :1], k[:, :, :1], v[:, :, :1], bias[:, :1])[:, :, 0]
    same(memory_efficient_attention(*of_three, own), want, [q, k, v, bias])
    grouped = [x.unflatten(2, (1, 3)) for x in (q, k, v)]
    got = memory_efficient_attention(*grouped, bias.unsqueeze(1))
    same(got.flatten(2, 3), defined(q, k, v, bias), [q, k, v, bias])


def test_a_triangle_with_a_bias_is_both():
    q, k, v, bias = drawn((1, 20, 2, 16), (1, 20, 2, 16), (1, 20, 2, 16), (1, 2, 20, 20))
    triangle = bias_of("LowerTriangularMaskWithTensorBias", [20], [20], 20)
    for added in (bias, bias.masked_fill(bias > 1, -torch.inf)):
        triangle._bias = added
        dead = torch.ones(20, 20, dtype=torch.bool).triu(1)
        want = defined(q, k, v, added.masked_fill(dead, -torch.inf))
        same(memory_efficient_attention(q, k, v, triangle, block=16), want, [q, k, v, bias])


class AttentionBias:
    pass


class LowerTriangularMask(torch.Tensor, AttentionBias):
    """Since xformers 0.0.24: a tensor without contents around `_subtensor`."""

    @staticmethod
    def __new__(cls, inner=None):
        inner = torch.empty(0) if inner is None else inner
        shape = inner.shape if len(inner) else []
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=inner.dtype, requires_grad=inner.requires_grad)
        made._subtensor = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        return NotImplemented


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    pass


def test_triangles_that_are_tensors_are_no_tensors_to_add():
    q, k, v, bias = drawn((1, 20, 2, 16), (1, 20, 2, 16), (1, 20, 2, 16), (1, 2, 20, 20))
    dead = torch.ones(20, 20, dtype=torch.bool).triu(1)
    triangle = defined(q, k, v, torch.zeros(20, 20).masked_fill(dead, -torch.inf))
    same(memory_efficient_attention(q, k, v, LowerTriangularMask(), block=16), triangle, [q, k, v])
    want = defined(q, k, v, bias.masked_fill(dead, -torch.inf))
    same(memory_efficient_attention(q, k, v, LowerTriangularMaskWithTensorBias(bias)), want, [q, k, v, bias])
    unknown = type("Other", (LowerTriangularMask,), {})()
    with pytest.raises(TypeError, match=r"attn_bias must be None, a tensor or one of .*; got Other\."):
        memory_efficient_attention(q, k, v, unknown)


def test_a_choice_of_their_kernels_changes_nothing():
    (q,) = drawn((1, 20, 2, 16))
    assert torch.equal(memory_efficient_attention(q, q, q, op=(object, object)), memory_efficient_attention(q, q, q))


def test_a_bias_of_blocks_and_dropout():
    q, k, v = drawn((1, 28, 2, 16), (1, 36, 2, 16), (1, 36, 2, 16))
    bias = bias_of("BlockDiagonalCausalMask", [5, 3, 20], [9, 3, 24], 0)
    live = mask_of_bias(bias, 28, 36, block=16).to_dense()[0, 0]
    want = defined(q, k, v, torch.zeros(28, 36).masked_fill(~live, -torch.inf))
    same(memory_efficient_attention(q, k, v, bias), want, [q, k, v])
    assert memory_efficient_attention(q, k, torch.ones_like(v), bias, 0.5).std() > 0.05


Q = torch.zeros(1, 8, 2, 16)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: memory_efficient_attention(Q, Q, Q[0]),
            ValueError,
            "value must have shape [B, M, H, K], [B, M, K] or",
        ),
        (
            lambda: memory_efficient_attention(Q, Q, Q, output_dtype=torch.float64),
            ValueError,
            "output_dtype must be None or query's dtype; got torch.float64.",
        ),
        (
            lambda: memory_efficient_attention(Q, Q, Q, torch.ones(8, 8, dtype=torch.bool)),
            TypeError,
            "attn_bias must be floating, 0 and -inf for a mask; got torch.bool.",
        ),
        (
            lambda: memory_efficient_attention(Q, Q, Q, "causal"),
            TypeError,
            "attn_bias must be None, a tensor or one of xformers' LowerTriangularMask, ",
        ),
        (
            lambda: memory_efficient_attention(Q, Q, Q, bias_of("BlockDiagonalMask", [5, 2], [5, 3], 0)),
            ValueError,
            "attn_bias must be of 8 queries and 8 keys; got 7 and 8.",
        ),
    ],
)
def test_what_cannot_be_taken_is_refused_in_a_sentence(call, error, words):
    with pytest.raises(error, match=re.escape(words)):
        call()
