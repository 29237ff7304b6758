"""Positions past 2^24, and rows so far apart that offsets inside a tile exceed 32 bits."""

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash import attention, masks, scores
from sparseflash.backends.problem import Problem
from sparseflash.backends.registration import empty_gradient, empty_out
from sparseflash.backends.triton import api
from sparseflash.backends.triton.changes.distance import distances
from sparseflash.backends.triton.changes.pair_bias import pointers_of_pairs, strides_of_pairs
from sparseflash.backends.triton.dispatch import decide
from sparseflash.backends.triton.family import Request
from sparseflash.backends.triton.hopper import support
from sparseflash.backends.triton.launcher import Launch, Variant
from sparseflash.backends.triton.persistent import backward_plan, fused_plan
from sparseflash.backends.triton.prepared_call import setting_of
from sparseflash.backends.triton.schedule.plan import plan_of
from sparseflash.limits import COUNT, FAR, MOST_TOKENS, is_near

LONG = 16_905_216
SIZES = 16, 32
INTERPRETED = triton.knobs.runtime.interpret


# ---------------------------------------------------------------------- positions


@triton.jit
def distances_kernel(
    first_ptr, out_ptr, first_q, first_k, q_len, k_len,
    M: tl.constexpr, N: tl.constexpr, IS_LOG: tl.constexpr, TRANSPOSED: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    if GATHERED:
        if TRANSPOSED:
            first_q = tl.load(first_ptr + tl.arange(0, M))
        else:
            first_k = tl.load(first_ptr + tl.arange(0, N))
    found = distances(first_q, first_k, q_len, k_len, M, N, IS_LOG, TRANSPOSED)
    rows, columns = tl.arange(0, found.shape[0]), tl.arange(0, found.shape[1])
    tl.store(out_ptr + rows[:, None] * found.shape[1] + columns[None, :], found)


@st.composite
def positions(draw):
    q_len, k_len = (draw(st.integers(64, MOST_TOKENS) | st.integers(64, 2**25)) for _ in "qk")
    first_q = draw(st.integers(0, q_len - SIZES[0]))
    near = min(max(first_q + k_len - q_len + draw(st.integers(-100, 100)), 0), k_len - SIZES[1])
    return q_len, k_len, first_q, draw(st.sampled_from([near, near, draw(st.integers(0, k_len - SIZES[1]))]))


@pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter")
@given(positions(), st.booleans(), st.booleans(), st.booleans())
@example((16, LONG, 0, LONG - 64), False, False, False)
@example((16, LONG, 0, LONG - 64), True, True, True)
@example((MOST_TOKENS, MOST_TOKENS, MOST_TOKENS - 16, 3), True, False, False)
def test_distances_are_those_of_whole_numbers_wherever_tokens_stand(place, is_log, transposed, gathered):
    q_len, k_len, first_q, first_k = place
    q, k = first_q + torch.arange(SIZES[0]), first_k + torch.arange(SIZES[1])
    first = (q if transposed else k).to(torch.int32)
    if gathered:
        first = first.flip(0).contiguous()
        q, k = (first.long(), k) if transposed else (q, first.long())
    want = (q[:, None] + (k_len - q_len) - k).abs().double()
    want = (want.log1p() if is_log else want).T if transposed else (want.log1p() if is_log else want)
    found = torch.empty(want.shape)
    distances_kernel[(1,)](first, found, first_q, first_k, q_len, k_len, *SIZES, is_log, transposed, gathered)
    if not is_log:  # one rounding more than the number itself has, and none where it is a number of fp32
        assert torch.equal(found[want < 2**24].double(), want[want < 2**24])
    torch.testing.assert_close(found.double(), want, rtol=3e-7 if is_log else 2.0**-23, atol=1e-7)


@pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter")
@pytest.mark.parametrize("kind", ["alibi", "log_decay", "relative", "function"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_scores_of_far_positions_are_exact(kind, dtype):
    table = torch.linspace(-1, 1, 9).expand(2, 9)
    slopes = torch.tensor([0.5, 0.03125])
    change = {
        "alibi": lambda: scores.alibi(slopes), "log_decay": lambda: scores.log_decay(slopes),
        "relative": lambda: scores.relative(table, scores.clipped(4)),
        "function": lambda: scores.function(lambda s, b, h, q, k: s - ((q + (LONG - 16) - k).abs() * 0.03125)),
    }[kind]  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    q, one = (torch.randn(1, 2, n, 16, generator=generator).to(dtype) for n in (16, 1))
    product = (q.double() @ one.double().mT) / 4
    apart = torch.arange(40).double()
    added = {
        "alibi": -slopes[:, None].double() * apart, "log_decay": -slopes[:, None].double() * apart.log1p(),
        "relative": table.double()[:, [4, 3, 2, 1] + 36 * [0]], "function": (-0.03125 * apart).expand(2, 40),
    }[kind]  # fmt: skip
    want = product[..., 0] + added.logsumexp(-1)[:, None]
    mask = masks.local(16, LONG, window=40, causal=True, block=16)
    k = one.expand(1, 2, LONG, 16)
    _, found = attention(q, k, k, mask, scores=change(), backend="triton", return_lse=True)
    torch.testing.assert_close(found.double(), want, rtol=2e-6, atol=2e-6)


# ---------------------------------------------------------------------- offsets


@triton.jit
def addresses_kernel(
    ptr, out_ptr, gathered_ptr, strides, first_q, first_k, M: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    at = pointers_of_pairs(ptr, strides, 1, 2, first_q, first_k, M, N, TRANSPOSED)
    rows, columns = tl.arange(0, at.shape[0]), tl.arange(0, at.shape[1])
    tl.store(out_ptr + rows[:, None] * at.shape[1] + columns[None, :], at.to(tl.int64))


@pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter")
@given(st.integers(1, 2**31 - 1) | st.integers(FAR - 64, FAR + 64), st.integers(0, 2**20), st.booleans())
@example(17_000_000, 0, False)
@example(FAR, 3, True)
def test_addresses_of_pairs_are_right_whatever_the_number_of_keys(keys, tile, transposed):
    strides = strides_of_pairs((5 * keys, 3 * keys, keys, 1))
    first_q, first_k = 256 * tile, 64 * (tile % 100)
    x, found = torch.zeros(1), torch.empty(*((64, 256) if transposed else (256, 64)), dtype=torch.int64)
    addresses_kernel[(1,)](x, found, None, strides, first_q, first_k, 256, 64, transposed)
    q, k = first_q + torch.arange(256)[:, None], first_k + torch.arange(64)
    want = x.data_ptr() + 4 * (5 * keys + 2 * 3 * keys + q * keys + k)
    assert torch.equal(found, want.T if transposed else want)


@pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter")
def test_a_bias_of_so_many_keys_is_read_where_it_lies():
    keys, queries, window = 35_000_000, 80, 20
    q, v = torch.randn(1, 1, queries, 16).half(), torch.zeros(1, 1, 1, 16).half().expand(1, 1, keys, 16)
    values = torch.empty(1, 1, queries, keys, dtype=torch.float16)
    live = torch.randn(queries, queries + 256).half()
    values[0, 0, :, -live.shape[1] :] = live
    mask = masks.local(queries, keys, window=window, causal=True, block=128)
    _, lse = attention(q, v, v, mask, scores=scores.bias(values), backend="triton", return_lse=True)
    rows = live.double()[:, -queries - window + 1 :].unfold(1, window, 1)[torch.arange(queries), torch.arange(queries)]
    torch.testing.assert_close(lse[0, 0].double(), rows.logsumexp(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter")
@pytest.mark.parametrize("block", [64, 128])
def test_tokens_as_far_apart_as_is_taken_are_read_where_they_lie(block):
    tokens, stride = 136, FAR - 8
    memory = torch.empty((tokens - 1) * stride + 16, dtype=torch.float16)
    k = memory.as_strided((1, 1, tokens, 16), (0, 0, stride, 1))
    near = torch.randn(1, 1, tokens, 16, generator=torch.Generator().manual_seed(0)).half()
    k.copy_(near)
    mask = masks.causal(tokens, block=block)
    got, want = (attention(near, x, x, mask, backend="triton") for x in (k, near))
    assert is_near(k) and torch.equal(got, want)


def empty(shape, strides):
    return torch.empty_strided(shape, strides, dtype=torch.float16, device="meta")


SHAPES = st.tuples(st.integers(1, 3000), st.integers(1, 70_000), st.integers(1, 300), st.integers(1, 256))


@given(SHAPES, st.permutations(range(3)), st.sets(st.integers(0, 2)), st.integers(1, 256))
@example((1, 66_100, 128, 64), [0, 2, 1], set(), 256)  # tokens first
@example((2_100, 64, 100, 128), [2, 0, 1], {1}, 128)
def test_outputs_that_are_allocated_lie_near_in_whatever_layout_comes_in(shape, order, expanded, v_dim):
    strides, stride = [0, 0, 0, 1], shape[3]
    for axis in reversed(order):
        strides[axis] = 0 if axis in expanded else stride
        stride *= 1 if axis in expanded else shape[axis]
    x = empty(shape, strides)
    out = empty_out(x, empty((*shape[:3], v_dim), [1, 1, 1, 1]))
    assert is_near(out) and is_near(empty_gradient(x))
    if shape[1] > 1 and shape[2] > 1 and strides[1] < strides[2] and shape[1] * v_dim < FAR:
        assert out.stride(1) == v_dim


@st.composite
def launches(draw):
    kv_heads, group, dims = draw(st.integers(1, 400)), draw(st.sampled_from([1, 1, 7, 170])), (16, 64, 128, 256)
    batch, q_len, k_len = draw(st.integers(1, 3)), draw(st.integers(1, 300)), draw(st.integers(1, 300))
    dim, v_dim = draw(st.sampled_from(dims)), draw(st.sampled_from(dims))
    made = []
    for heads, length, size in ((kv_heads * group, q_len, dim), (kv_heads, k_len, dim), (kv_heads, k_len, v_dim)):
        shape, stride, strides = (batch, heads, length, size), size, [0, 0, 0, 1]
        for axis in draw(st.permutations(range(3))):
            if draw(st.integers(0, 3)):
                strides[axis] = stride
                stride *= shape[axis]
            if shape[axis] == 1:
                strides[axis] = draw(st.sampled_from([strides[axis], FAR, 2**31, 2**40]))
        made.append(empty(shape, strides))
    return made


TOKENS_FIRST = empty((1, 66_100, 128, 64), (0, 64, 66_100 * 64, 1))
FAR_KEYS = empty((3, 64, 128, 128), (2**17, 0, FAR - 8, 1))


@given(launches(), st.sampled_from([(8, 0), (9, 0)]))
@example([TOKENS_FIRST, *[empty((1, 1, 128, n), (0, 0, n, 1)) for n in (64, 256)]], (9, 0))
@example([empty((3, 64, 128, 128), (2**20, 2**14, 128, 1)), FAR_KEYS, FAR_KEYS], (8, 0))
def test_all_that_kernels_read_and_write_by_strides_lies_near(tensors, capability):
    q, k, v = tensors
    try:
        api.check_layout(q, k, v)
    except ValueError as error:
        assert "elements apart" in str(error)
        return
    setting = setting_of(q, k, Problem.of(None, scale=1.0), capability, torch.device("cpu"))
    forward, backward = decide(Request.of(setting, q, v, backward=True), "portable").serving().passes()
    out, dout = empty_out(q, v), empty((*q.shape[:3], v.shape[3]), (1, 0, 2**40, 1))
    key = (capability, "far", *[(x.shape, x.stride()) for x in tensors])
    passes = forward(setting, key, q, k, v, 1.0, 0), backward(setting, key, q, k, v, out, dout, 1.0, 0, dlse=False)
    seen = 0
    for launch in (each.launch for made in passes for each in made.launches()):
        for name, held in launch.examples.items():
            for x in held if isinstance(held, tuple) else (held,):
                if x is not None and x.ndim == 4:
                    assert is_near(x), (launch.variant.function.__name__, name, x.shape, x.stride())
                    seen += 1
    assert seen >= 12


# ---------------------------------------------------------------------- counts


def test_numbers_and_grids_that_do_not_fit_are_no_arguments_of_kernels():
    device = torch.device("cpu")
    variant = Variant(addresses_kernel, {"M": 16, "N": 16, "TRANSPOSED": False}, device, num_warps=4, num_stages=1)
    names = ("ptr", "out_ptr", "gathered_ptr")
    fixed = {"strides": (2**40, 1), "first_q": 0, "first_k": 0}
    launch = Launch(variant, fixed, {}, {}, bound=names)
    for number in (COUNT, -COUNT):
        with pytest.raises(ValueError, match=r"first_k of addresses_kernel must be below 2\^31; got 2147483648"):
            Launch(variant, fixed | {"first_k": number}, {}, {}, bound=names)
    with pytest.raises(ValueError, match=r"programs of addresses_kernel must be below 2\^31; got 2147483648"):
        launch.bind(COUNT, **dict.fromkeys(names))


def test_hopper_lists_no_more_tiles_than_its_kernels_count(monkeypatch):
    mask, pattern = masks.causal(512, block=128), torch.zeros(2, 3, dtype=torch.int32)
    problem = Problem.of(mask, scale=1.0)
    plan = plan_of(problem, (2, 3), 3, (512, 512))
    lists = plan.lists.get(1, None)
    assert backward_plan.check_entries(lists, pattern, 512, 512) is None
    for most, refuses in ((60, False), (59, True)):
        monkeypatch.setattr(backward_plan, "MOST_ENTRIES_LISTED", most)
        if not refuses:
            assert backward_plan.check_entries(lists, pattern, 512, 512) is None
            continue
        with pytest.raises(ValueError, match=r"live tiles of all heads must be at most 59 for .* got 60\..*'triton'"):
            backward_plan.check_entries(lists, pattern, 512, 512)
        with pytest.raises(ValueError, match="live tiles of all heads must be at most 59"):
            fused_plan.backward_plan(lists, pattern, pattern, 3, 512, 512, programs=4)
    q = empty((2, 3, 1 << 17, 128), (3 << 24, 1 << 24, 128, 1))
    setting = setting_of(q, q, Problem.of(None, scale=1.0), (9, 0), torch.device("cpu"))
    request = Request.of(setting, q, q, backward=True)
    assert support.yields(request) is None
    monkeypatch.setattr(support, "MOST_ENTRIES_LISTED", 6 << 20)
    assert (
        support.yields(request) == "they list at most 6,291,456 tiles of all heads for a backward; got about 6,291,456"
    )
    assert math.isclose(request.keys, 1 << 17) and support.yields(request._replace(backward=False)) is None


@pytest.mark.gpu
def test_far_positions_on_a_gpu():
    q, k, v = (torch.randn(1, 2, n, 64, device="cuda", dtype=torch.bfloat16) for n in (24, LONG, LONG))
    mask, small = (masks.local(24, keys, window=40, causal=True, block=16).to("cuda") for keys in (LONG, 80))
    slopes, table = torch.tensor([0.5, 0.03125], device="cuda"), torch.randn(2, 9, device="cuda")
    cut = slice(LONG - 80, LONG)
    for change in (scores.alibi(slopes), scores.log_decay(slopes), scores.relative(table, scores.clipped(4))):
        got = attention(q, k, v, mask, scores=change)
        want = attention(q, k[:, :, cut], v[:, :, cut], small, scores=change)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
