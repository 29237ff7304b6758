import math
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash.backends.triton.launcher import Launch
from sparseflash.backends.triton.selected import gates
from sparseflash.masks.tiling.columns import Pool
from sparseflash.selection import choice
from sparseflash.selection.choice import Candidates, best_blocks, by_operations, summed
from sparseflash.selection.gates import gated_sum
from tests.drawn.masks import SEEDS
from tests.masks.chosen_blocks import by, coarse, distinct, generator
from tests.selection.layers import KINDS, example_of, sequence


def candidates(rows, blocks, seed):
    ends = torch.randint(0, blocks + 1, (2, rows), generator=generator(seed)).sort(0).values.to(torch.int32)
    return Candidates(*ends)


@given(
    st.integers(1, 4), st.integers(1, 90), st.integers(1, 100), st.integers(0, 2), st.integers(0, 2),
    st.sampled_from([coarse, distinct]), st.integers(1, 300), SEEDS,
)  # fmt: skip
@example(2, 5000, 700, 1, 1, coarse, 1 << 20, 0)
@example(2, 5000, 700, 0, 0, distinct, 1 << 20, 1)
@example(2, 2048, 2048, 0, 0, coarse, 1 << 20, 2)  # in registers
@example(1, 6000, 4200, 0, 1, distinct, 1 << 20, 3)  # too many for registers
def test_the_largest_of_a_row_are_those_of_a_sort(rows, blocks, k, first, last, make, at_once, seed):
    scores = make((2, 3, rows, blocks), seed)
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    of = candidates(rows, blocks, seed)
    found = {}
    for way in ("operations", "kernels"):
        with by(way):
            found[way] = best_blocks(
                lambda part: scores[:, :, part], of, blocks=blocks, k=k, per_row=choice.AT_ONCE // at_once,
                first=first, last=last,
            )  # fmt: skip
    assert found["kernels"].shape == (2, 3, rows, min(k, blocks))
    assert torch.equal(found["kernels"], found["operations"])


def test_of_many_equal_scores_the_first_are_chosen_beside_greater_ones_behind_them():
    scores = torch.ones(1, 1, 2, 3000)  # more than there are places in registers
    scores[..., -100:] = 2.0
    of = Candidates(torch.tensor([0, 5], dtype=torch.int32), torch.tensor([3000, 3000], dtype=torch.int32))
    with by("kernels"):
        got = best_blocks(lambda rows: scores[:, :, rows], of, blocks=3000, k=700, per_row=1)
    for row, begin in enumerate((0, 5)):
        assert got[0, 0, row].tolist() == [*range(begin, begin + 600), *range(2900, 3000)]


def test_nan_is_not_chosen_and_minus_zero_equals_zero():
    scores = torch.tensor([math.nan, -0.0, 0.0, -math.inf, -0.0, -1.0]).view(1, 1, 1, 6)
    of = Candidates(torch.tensor([0], dtype=torch.int32), torch.tensor([6], dtype=torch.int32))
    with by("kernels"):
        for k, want in ((2, [1, 2]), (4, [1, 2, 4, 5]), (6, [1, 2, 4, 5, -1, -1])):
            assert best_blocks(lambda _: scores, of, blocks=6, k=k, per_row=1).flatten().tolist() == want


@given(
    st.integers(1, 40), st.integers(1, 70), st.sampled_from([(1, 1), (4, 1), (4, 2)]), st.sampled_from([3, 16]),
    st.sampled_from([None, 0.7, -0.7]), st.sampled_from([torch.float32, torch.float16]), SEEDS,
)  # fmt: skip
def test_scores_summed_over_heads_are_those_of_operations(rows, keys, heads, dim, scale, dtype, seed):
    q, k, factors = (
        torch.randn(2, *shape, generator=generator(seed + i)).to(dtype)
        for i, shape in enumerate([(heads[0], rows, dim), (heads[1], keys, dim), (heads[0], rows)])
    )
    of, part = candidates(rows, keys, seed), slice(rows // 3, rows)
    number = torch.arange(keys)
    live = (number >= of.begins[part, None]) & (number < of.stops[part, None])
    if scale is not None:
        factors = torch.where(of.begins < of.stops, factors.float(), -torch.inf)
    with by("kernels"):
        got = summed(q, k, factors, of, part, scale=scale)
    weights = None if scale is None else (scale, of, part)
    want = by_operations(q[:, :, part].double(), k.double(), factors[:, :, part].double(), weights)
    if scale is None:
        got, want = got.masked_fill(~live, 0.0), want.masked_fill(~live, 0.0)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@given(
    st.integers(1, 40), st.integers(1, 300), st.sampled_from([(1, 1), (4, 2)]), st.sampled_from([3, 24]),
    st.sampled_from([(1, 1), (4, 2), (2, 4), (1, 3), (16, 8)]), st.sampled_from([torch.float32, torch.float16]), SEEDS,
)  # fmt: skip
@example(5, 290, (4, 2), 24, (4, 2), torch.float16, 0)  # several tiles, and a head dim in two pieces
def test_weights_of_blocks_are_those_of_operations(rows, keys, heads, dim, parts_and_pieces, dtype, seed):
    parts, pieces = parts_and_pieces
    q, k = (
        torch.randn(2, *shape, generator=generator(seed + i)).to(dtype)
        for i, shape in enumerate([(heads[0], rows, dim), (heads[1], keys, dim)])
    )
    of, part = candidates(rows, keys, seed), slice(rows // 3, rows)
    lse = torch.where(of.begins < of.stops, torch.randn(2, heads[0], rows, generator=generator(seed)), -torch.inf)
    # The last keys begin in a block that has not ended.
    pool = Pool(-(-(keys + pieces) // parts), parts, pieces)
    with by("kernels"):
        got = summed(q, k, lse, of, part, scale=0.7, pool=pool)
    weights = by_operations(q[:, :, part].double(), k.double(), lse[:, :, part].double(), (0.7, of, part))
    want = torch.zeros(*weights.shape[:3], pool.blocks, dtype=torch.float64)
    for key in range(keys):  # its pieces are those from `key` on
        for piece in range(key, key + pieces):
            if piece // parts < pool.blocks:
                want[..., piece // parts] += weights[..., key]
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(summed(q, k, lse, of, part, scale=0.7, pool=pool).double(), want, rtol=2e-2, atol=2e-2)


@given(st.integers(1, 3), st.integers(1, 70), st.sampled_from([16, 24]), st.booleans(), SEEDS)
def test_gated_sums_and_their_gradients_are_those_of_operations(heads, rows, dim, apart, seed):
    shapes = [(2, rows, 3 * heads), *[(2, heads, rows, dim)] * 4]
    logits, *parts, dout = (torch.randn(shape, generator=generator(seed + i)) for i, shape in enumerate(shapes))
    if apart:  # tokens before heads in memory
        parts = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts]
    results = []
    for way in ("operations", "kernels"):
        given = [x.detach().requires_grad_() for x in (logits, *parts)]
        with by(way), mock.patch.object(gates, "backward", side_effect=gates.backward) as backward:
            out = gated_sum(*given)
            results.append((out, *torch.autograd.grad(out, given, dout)))
        assert backward.called == (way == "kernels")
    for want, got in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_profiler_sees_the_kernel_of_gated_sums():
    logits, *parts = torch.randn(1, 3, 6), *torch.randn(3, 1, 2, 3, 16)
    with (
        by("kernels"), mock.patch.object(gates, "forward", side_effect=gates.forward) as forward,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    ):  # fmt: skip
        gated_sum(logits, *parts)
    assert forward.called


def test_gradients_of_gradients_of_gated_sums_are_those_of_operations():
    shapes = [(2, 20, 6), *[(2, 2, 20, 16)] * 3]
    given = [torch.randn(shape, generator=generator(i), requires_grad=i != 2) for i, shape in enumerate(shapes)]
    wanted = [x for x in given if x.requires_grad]
    results = []
    for way in ("operations", "kernels"):
        with by(way):
            first = torch.autograd.grad(gated_sum(*given).sum(), wanted, create_graph=True)
            results.append(torch.autograd.grad(sum(x.square().sum() for x in (*first, *wanted)), wanted))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_gradients_of_gated_sums_that_keep_their_graph_do_not_count_a_tensor_twice():
    x = torch.randn(2, 2, 20, 16, generator=generator(0), requires_grad=True)
    logits = torch.randn(2, 20, 6, generator=generator(1), requires_grad=True)
    y = 2 * x
    for parts in ((x, x, x), (y, y, x), (y, y.sin(), y.cos())):
        results = []
        for way in ("operations", "kernels"):
            with by(way):
                total = gated_sum(logits + y.mean(), *parts).square().sum()
                results.append(torch.autograd.grad(total, (logits, x), create_graph=True))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sums", [None, [0, 37, 40, 100]])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_chooses_by_kernels_what_it_chooses_by_operations(kind, sums):
    layer, x = example_of(kind).float(), sequence(100, 1).float()
    outs = []
    for way in ("operations", "kernels"):
        with (
            by(way),
            torch.no_grad(),
            mock.patch.object(Launch, "start", autospec=True, side_effect=Launch.start) as start,
        ):
            outs.append(layer(x, cu_seqlens=sums))
        assert start.called == (way == "kernels")
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_after_a_cache_a_layer_chooses_by_kernels_what_it_chooses_by_operations(kind):
    layer, x = example_of(kind).float().eval(), sequence(100, 1, batch=2).float()
    outs = []
    for way in ("operations", "kernels"):
        cache = layer.new_cache(2, 130)
        layer(x[:, :97], cache=cache)
        with by(way), mock.patch.object(Launch, "start", autospec=True, side_effect=Launch.start) as start:
            outs.append(torch.cat([layer(part, cache=cache) for part in x[:, 97:].split(1, 1)], 1))
        assert start.called == (way == "kernels")
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(outs[0], layer(x)[:, 97:], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [None, 0.01])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_chooses_by_kernels_what_it_chooses_by_operations(dtype, scale):
    rows, keys, k = 700, 5000, 2048
    q, k_of, factors = (
        torch.randint(-2, 3, shape, generator=generator(seed)).to(dtype).cuda()
        for seed, shape in enumerate([(1, 8, rows, 128), (1, 1, keys, 128), (1, 8, rows)])
    )
    ends = torch.arange(rows, device="cuda", dtype=torch.int32)
    of = Candidates(ends // 3, ends * 7)
    if scale is not None:  # weights are summed in another order, so the scores are not the same to the bit
        part = slice(100, 700)
        want = by_operations(q[:, :, part].double(), k_of.double(), factors[:, :, part].double(), (scale, of, part))
        got = summed(q, k_of, factors.float(), of, part, scale=scale)
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)
        return
    found = []
    for _ in range(2):
        found.append(
            best_blocks(lambda part: summed(q, k_of, factors, of, part), of, blocks=keys, k=k, per_row=1 << 18)
        )
    with by("operations"):
        wide = q.double(), k_of.double(), factors.double()
        want = best_blocks(
            lambda part: by_operations(wide[0][:, :, part], wide[1], wide[2][:, :, part]), of, blocks=keys, k=k,
            per_row=1 << 18,
        )  # fmt: skip
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], want)
