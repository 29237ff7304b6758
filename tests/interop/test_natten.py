import itertools
import re

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash.interop import natten_layers
from sparseflash.interop.natten import _kept, _order, na1d, na2d, na3d
from sparseflash.masks import neighborhood

FUNCTIONS = {1: na1d, 2: na2d, 3: na3d}


def axis_live(n, window, stride, dilation, causal):
    """`csrc/include/natten/cuda/reference/mask.hpp`, with its names: bool `[n, n]`."""
    live = torch.zeros(n, n, dtype=torch.bool)
    left, right = window // 2, window // 2 + window % 2 - 1
    for q in range(n):
        group, index = q % dilation, q // dilation
        padding = 1 - (group + (dilation - n % dilation)) // dilation
        length = n // dilation + padding
        if causal:
            leader = min(index // stride * stride + stride - 1, length - 1)
            start, end = max(leader - left - right, 0), min(index + 1, length)
        else:
            leader = min(index // stride * stride + stride // 2, length - 1)
            start = max(leader - left, 0)
            if leader + right >= length:
                start += length - right - leader - 1
            end = start + window
        live[q, group::dilation][start:end] = True
    return live


def grid_live(grid, windows, strides, dilations, causals):
    live = torch.ones(1, 1, dtype=torch.bool)
    for each in zip(grid, windows, strides, dilations, causals):
        own = axis_live(*each)
        live = (live[:, None, :, None] & own[None, :, None, :]).flatten(0, 1).flatten(1)
    return live


def defined(q, k, v, live, scale=None):
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s.masked_fill(~live, -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v), s.logsumexp(-1).transpose(1, 2)


@st.composite
def rules(draw):
    axes = draw(st.integers(1, 3))
    grid, rule = [], []
    for _ in range(axes):
        dilation, window = draw(st.integers(1, 3)), draw(st.integers(1, 5))
        most = {1: 60, 2: 13, 3: 7}[axes]
        window = min(window, most // dilation)
        grid.append(draw(st.integers(window * dilation, most)))
        rule.append((window, draw(st.integers(1, window)), dilation, draw(st.booleans())))
    return tuple(grid), *map(tuple, zip(*rule))


@given(rule=rules(), more=st.sampled_from([0, 5, 20]), seed=st.integers(0, 99))
@example(rule=((50,), (7,), (1,), (1,), (True,)), more=0, seed=0)
@example(rule=((13, 12), (5, 4), (2, 3), (2, 1), (False, True)), more=5, seed=0)
@example(rule=((4, 7, 6), (2, 3, 3), (1, 2, 1), (2, 1, 2), (True, False, False)), more=20, seed=0)
def test_the_functions_are_natten_s_rule(rule, more, seed):
    grid, windows, strides, dilations, causals = rule
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randn(2, *grid, heads, dim, generator=generator, dtype=torch.float64).requires_grad_()
        for heads, dim in ((4, 16), (2, 16), (2, 8))
    ]
    beside = [
        torch.randn(2, more, 2, dim, generator=generator, dtype=torch.float64).requires_grad_() for dim in (16, 8)
    ]
    options = {"additional_keys": beside[0], "additional_values": beside[1]} if more else {}
    out, lse = FUNCTIONS[len(grid)](
        *inputs, kernel_size=windows, stride=strides, dilation=dilations, is_causal=causals, return_lse=True, block=16,
        **options,
    )  # fmt: skip
    live = grid_live(grid, windows, strides, dilations, causals)
    live = torch.cat([live, torch.ones(len(live), more, dtype=torch.bool)], 1)
    q, k, v = (x.flatten(1, len(grid)) for x in inputs)
    want, want_lse = defined(q, torch.cat([k, beside[0]], 1), torch.cat([v, beside[1]], 1), live)
    torch.testing.assert_close(out.flatten(1, len(grid)), want)
    torch.testing.assert_close(lse.flatten(1, len(grid)), want_lse)
    leaves = inputs + (beside if more else [])
    dout = torch.randn(want.shape, generator=generator, dtype=want.dtype)
    for a, b in zip(
        torch.autograd.grad(out.flatten(1, len(grid)), leaves, dout), torch.autograd.grad(want, leaves, dout)
    ):
        torch.testing.assert_close(a, b)


@given(rule=rules())
def test_the_pattern_of_the_library_is_the_same_rule(rule):
    grid, windows, strides, dilations, causals = rule
    mask = neighborhood(grid, window=windows, stride=strides, dilation=dilations, causal=causals, block=16)
    assert torch.equal(mask.to_dense()[0, 0], grid_live(*rule))


@pytest.mark.parametrize(
    ("grid", "window", "dilation", "reordered"),
    [
        ((64, 64), 9, (1, 1), True), ((60, 50), 13, (1, 1), True), ((32, 32), 9, (2, 1), True),
        ((8, 32, 32), 7, (1, 1, 1), True), ((256,), 5, (4,), True), ((32, 32), 3, (1, 1), False),
        ((256,), 5, (1,), False),
    ],
)  # fmt: skip
def test_the_order_with_fewer_live_tiles_is_taken(grid, window, dilation, reordered):
    ones = (1,) * len(grid)
    windows = (window,) * len(grid)
    mask, order, back = _kept(grid, windows, ones, dilation, (False,) * len(grid), 0, 64, torch.device("cpu"))
    plain = neighborhood(grid, window=windows, dilation=dilation, block=64)
    assert (order is not None) == (back is not None) == reordered
    assert len(mask.indices) < len(plain.indices) if reordered else mask == plain


def test_a_sequence_keeps_its_order_and_tiles_are_whole_where_they_fit():
    assert _order((100,), (1,), 64) is None
    first = _order((16, 32), (1, 1), 128)[:128]
    assert sorted(first.tolist()) == sorted(y * 32 + x for y, x in itertools.product(range(8), range(16)))
    first = _order((16, 32), (2, 1), 128)[:128]
    assert sorted(first.tolist()) == sorted(y * 32 + x for y, x in itertools.product(range(0, 16, 2), range(16)))
    assert _order((2, 64), (1, 1), 128).tolist() == list(range(128))


def test_masks_are_made_once_and_defaults_are_those_of_natten():
    q = torch.randn(1, 6, 6, 2, 16)
    once = _kept((6, 6), (3, 3), (1, 1), (1, 1), (False, False), 0, 128, q.device)
    out = na2d(q, q, q, 3, None, None, None)
    assert _kept((6, 6), (3, 3), (1, 1), (1, 1), (False, False), 0, 128, q.device) is once
    assert torch.equal(out, na2d(q, q, q, (3, 3), 1, 1, False))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by PyTorch's compiler
@pytest.mark.parametrize("options", [{}, {"dilation": 2}, {"additional_keys": True}], ids=str)
def test_it_compiles_without_a_graph_break(options):
    x = torch.randn(1, 24, 24, 2, 16, dtype=torch.float64, requires_grad=True)
    if options.pop("additional_keys", False):
        options = {
            name: torch.randn(1, 9, 2, 16, dtype=torch.float64) for name in ("additional_keys", "additional_values")
        }

    def layer(x):
        return na2d(x, x, x, 7, block=64, **options).square().sum()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    (want,), (got,) = (torch.autograd.grad(each(x), x) for each in (layer, compiled))
    torch.testing.assert_close(got, want)


Q = torch.zeros(1, 8, 8, 2, 16)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: na1d(Q, Q, Q, 3),
            ValueError,
            "query must have shape [B, N, heads, head dim], with the batch and grid of query, [1, 8, 8]; got [1, 8, 8,",
        ),
        (lambda: na2d(Q, Q[:, :4], Q, 3), ValueError, "key must have shape [B, height, width, heads, head dim], with"),
        (
            lambda: na2d(Q, Q, Q, 5, dilation=2),
            ValueError,
            "kernel_size * dilation must be at most the side of the grid, and stride at most kernel_size; got "
            "kernel_size 5, dilation 2 and stride 1 on a side of 8.",
        ),
        (lambda: na2d(Q, Q, Q, 3, stride=4), ValueError, "kernel_size 3, dilation 1 and stride 4 on a side of 8."),
        (lambda: na2d(Q, Q, Q, (3,)), ValueError, "kernel_size must be an integer, or one for each of the 2 axes"),
        (
            lambda: na2d(Q, Q, Q, 3, additional_keys=Q[0]),
            ValueError,
            "additional_keys and additional_values must be given together; got 'one of them'.",
        ),
        (
            lambda: na2d(Q, Q, Q, 3, additional_keys=Q[:, 0, :, :, :8], additional_values=Q[:, 0]),
            ValueError,
            "additional_keys must have shape [1, L, 2, 16]; got [1, 8, 2, 8].",
        ),
        (
            lambda: na2d(Q, Q, Q, 3, additional_keys=Q[:, 0], additional_values=Q),
            ValueError,
            "additional_values must have shape [1, L, 2, 16]; got [1, 8, 8, 2, 16].",
        ),
        (
            lambda: na2d(Q, Q, Q, 3, additional_keys=Q[:, 0].half(), additional_values=Q[:, 0]),
            ValueError,
            "additional_keys must have the dtype and device of key and value, torch.float32 and cpu; got torch.float16 "
            "and cpu.",
        ),
        (lambda: na2d(Q, Q, Q, 3, rpb=1), TypeError, "na2d got an argument that NATTEN does not have, 'rpb'."),
    ],
)
def test_what_cannot_be_taken_is_refused_in_a_sentence(call, error, words):
    with pytest.raises(error, match=re.escape(words)):
        call()


def test_choices_of_their_kernels_change_nothing():
    options = {"q_tile_shape": (8, 8), "kernel_schedule": "pp", "attention_kwargs": {}, "backend": "cutlass-fna"}
    assert torch.equal(na2d(Q, Q, Q, 3, **options), na2d(Q, Q, Q, 3))


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_layers_are_projections_around_the_functions(axes):
    torch.manual_seed(0)
    kind = getattr(natten_layers, f"NeighborhoodAttention{axes}D")
    layer = kind(32, 2, kernel_size=3, dilation=2, is_causal=(True, *[False] * (axes - 1)), qk_scale=0.4)
    assert [*layer.state_dict()] == ["qkv.weight", "qkv.bias", "proj.weight", "proj.bias"]  # NATTEN's names
    x = torch.randn(2, *(8, 6, 7)[:axes], 32)
    q, k, v = layer.qkv(x).reshape(*x.shape[:-1], 3, 2, 16).movedim(-3, 0)
    want = FUNCTIONS[axes](q, k, v, 3, 1, 2, (True, *[False] * (axes - 1)), 0.4)
    torch.testing.assert_close(layer(x), layer.proj(want.reshape(x.shape)))
    with pytest.raises(ValueError, match=r"x must have shape \[B, .*, 32\]; got \[2, "):
        layer(x[..., 1:])
    with pytest.raises(ValueError, match="embed_dim must be a multiple of num_heads; got 32 and 3"):
        kind(32, 3, kernel_size=3)
