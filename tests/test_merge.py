import re
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, attention, merge, merge_attention, scores
from sparseflash.backends.triton import merge as fused_merge
from sparseflash.testing import compare_results
from tests.drawn.masks import SEEDS
from tests.drawn.problems import problems


def parts_of(count, shape, dtype, seed, heads_inside):
    """Some parts have no keys for some queries, and none has keys for one query."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, tokens, dim = shape
    outs, lses = [], []
    for _ in range(count):
        out = torch.randn(batch, tokens, heads, dim, generator=generator).transpose(1, 2)
        lse = 4 * torch.randn(batch, heads, tokens, generator=generator)
        empty = torch.rand(batch, heads, tokens, generator=generator) < 0.3
        empty[:, :, 0] = True
        out, lse = out.masked_fill(empty.unsqueeze(-1), 0.0), lse.masked_fill(empty, -torch.inf)
        outs.append((out if heads_inside else out.contiguous()).to(dtype))
        lses.append(lse)
    dout = torch.randn(shape, generator=generator).to(dtype)
    return outs, lses, dout, torch.randn(shape[:3], generator=generator)


def results(outs, lses, dout, dlse, devices=()):
    leaves = [x.detach().requires_grad_() for x in (*outs, *lses)]
    with mock.patch.object(merge, "_DEVICES", devices):
        out, lse = merge_attention(leaves[: len(outs)], leaves[len(outs) :])
    gradients = torch.autograd.grad((out, lse), leaves, (dout.to(out.dtype), dlse.to(lse.dtype)))
    return {"out": out, "lse": lse, **{f"d{number}": x for number, x in enumerate(gradients)}}


@given(
    count=st.integers(2, 5), dtype=st.sampled_from([torch.float16, torch.float32]), seed=st.integers(0, 1000),
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 70), st.sampled_from([16, 20, 128])),
    heads_inside=st.booleans(),
)  # fmt: skip
def test_the_kernels_merge_as_exactly_as_operations(count, dtype, seed, shape, heads_inside):
    given_ = outs, lses, dout, dlse = parts_of(count, shape, dtype, seed, heads_inside)
    truth = results([x.double() for x in outs], [x.double() for x in lses], dout.double(), dlse.double())
    with mock.patch.object(fused_merge, "merge", wraps=fused_merge.merge) as called:
        got = results(*given_, devices=["cpu"])
    assert called.called
    assert compare_results(got, truth, results(*given_), magnitudes={"lse": 16.0}).exact
    assert got["out"].stride() == outs[0].stride()
    empty = truth["lse"] == -torch.inf
    assert torch.equal(got["lse"] == -torch.inf, empty) and got["out"][empty].eq(0).all()


def sliced(x):
    return torch.stack([x, torch.full_like(x, torch.nan)], 3).flatten(2, 3)[:, :, ::2]


def expanded(x):
    return x[:, :1].expand_as(x)


@pytest.mark.parametrize("layout", [sliced, expanded, lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2)])
@pytest.mark.parametrize("first", [True, False])
def test_parts_and_gradients_of_any_layout(layout, first):
    outs, lses, dout, dlse = parts_of(2, (2, 3, 20, 16), torch.float32, 0, False)
    outs = [layout(outs[0]), outs[1]] if first else [outs[0], layout(outs[1])]
    for gradient in (dout, layout(dout), layout(dout.transpose(1, 2).contiguous().transpose(1, 2))):
        given_ = outs, lses, gradient, dlse
        truth = results([x.double() for x in outs], [x.double() for x in lses], gradient.double(), dlse.double())
        assert compare_results(
            results(*given_, devices=["cpu"]), truth, results(*given_), magnitudes={"lse": 16.0}
        ).exact


def test_parts_must_fit_together():
    out, lse = torch.zeros(2, 3, 8, 16), torch.zeros(2, 3, 8)
    for outs, lses, error, text in (
        ([], [], ValueError, "outs and lses must be of equally many parts, at least one; got 0 and 0."),
        ([out, out], [lse], ValueError, "outs and lses must be of equally many parts, at least one; got 2 and 1."),
        ([out, out.half()], [lse, lse], ValueError, "outs must have one shape [..., Nq, Dv] and one dtype; got "
         "[2, 3, 8, 16] of torch.float32 and [2, 3, 8, 16] of torch.float16."),
        ([out], [lse.transpose(1, 2)], ValueError, "lses must have shape [2, 3, 8], as outs without the last dimension;"
         " got [2, 8, 3]."),
        ([out], [lse.long()], TypeError, "lses must be tensors of a floating dtype; got torch.int64."),
        (out.sum(), [lse], TypeError, "outs must be a sequence of tensors, one for each part; got Tensor."),
        (None, [lse], TypeError, "outs must be a sequence of tensors, one for each part; got NoneType."),
        ([out], [lse.to("meta")], ValueError, "outs and lses must be on one device; got cpu, cpu and meta."),
    ):  # fmt: skip
        with pytest.raises(error, match="^" + re.escape(text)):
            merge_attention(outs, lses)


@given(
    problem=problems(70, (16,), (16, 20), (16, 32), (torch.float64,)), seed=SEEDS, parts=st.integers(1, 4),
    sink_in=st.integers(-1, 3),
)  # fmt: skip
def test_parts_of_the_keys_merge_into_the_whole(problem, seed, parts, sink_in):
    q, k, v, dout, dlse = problem.tensors()
    mask = problem.mask
    dense = torch.ones(problem.q_len, problem.k_len, dtype=torch.bool) if mask is None else mask.to_dense()
    generator = torch.Generator().manual_seed(seed)
    of_part = torch.randint(parts, (problem.k_len,), generator=generator)
    logits = torch.randn(problem.heads, generator=generator, dtype=torch.float64).requires_grad_()
    has_sink = 0 <= sink_in < parts

    def over(live, sink):
        live = live.expand(*live.shape[:-2], problem.q_len, problem.k_len).contiguous()
        whole = BlockMask.from_dense(live, block=16)
        return attention(
            q, k, v, whole, scale=problem.scale, return_lse=True, scores=scores.sink(logits) if sink else None
        )

    found = [over(dense & (of_part == number), number == sink_in) for number in range(parts)]
    merged, whole = merge_attention(*zip(*found, strict=True)), over(dense, has_sink)
    leaves = [q, k, v, *[logits] * has_sink]
    got, wanted = (
        [*results, *torch.autograd.grad(results, leaves, (dout, dlse), retain_graph=True)]
        for results in (merged, whole)
    )
    for mine, theirs in zip(got, wanted, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)
    empty = ~dense.any(-1).expand(merged[1].shape)
    of_empty = logits if has_sink else torch.full_like(logits, -torch.inf)
    assert torch.equal(merged[1][empty], of_empty[:, None].expand(merged[1].shape)[empty])


@pytest.mark.parametrize("shape", [(6, 16), (3, 6, 16), (2, 1, 3, 6, 16)])
def test_any_leading_dimensions(shape):
    outs, lses = torch.randn(2, *shape, dtype=torch.float64), torch.randn(2, *shape[:-1], dtype=torch.float64)
    out, lse = merge_attention(outs, lses)
    weights = lses.softmax(0)
    assert torch.allclose(out, (weights.unsqueeze(-1) * outs).sum(0)) and torch.allclose(lse, lses.logsumexp(0))


@pytest.mark.parametrize("devices", [(), ("cpu",)])
@pytest.mark.parametrize("parts", [1, 2])
def test_what_a_query_without_keys_holds_does_not_matter(devices, parts):
    outs = [torch.full((1, 1, 3, 16), number).requires_grad_() for number in (torch.nan, 1.0)[:parts]]
    lses = [torch.tensor([[[-torch.inf] * 3]]), torch.tensor([[[0.0, 0.0, -torch.inf]]])][:parts]
    lses = [x.requires_grad_() for x in lses]
    with mock.patch.object(merge, "_DEVICES", devices):
        out, lse = merge_attention(outs, lses)
        gradients = torch.autograd.grad(out.sum() + lse[:, :, :1].sum(), [*outs, *lses])
    assert out[..., 0].tolist() == [[[1.0, 1.0, 0.0]]] if parts == 2 else out.eq(0).all()
    assert gradients[0].eq(0).all() and all(x.isfinite().all() for x in gradients[:parts])


@pytest.mark.parametrize("devices", [(), ("cpu",)])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_query_without_keys_has_no_gradients_whatever_arrives(devices, parts):
    outs, lses = [torch.ones(1, 1, 2, 16)] * parts, [torch.full((1, 1, 2), -torch.inf)] * parts
    got = results(outs, lses, torch.ones(1, 1, 2, 16), torch.full((1, 1, 2), torch.nan), devices)
    assert (got["lse"] == -torch.inf).all() and all(x.eq(0).all() for name, x in got.items() if name != "lse")


@pytest.mark.parametrize("devices", [(), ("cpu",)])
def test_gradients_of_gradients_and_gradients_in_batches(devices):
    """The kernels' results have no graph."""
    outs, lses, dout, dlse = parts_of(2, (1, 2, 5, 16), torch.float32, 0, False)

    def both(dtype, devices):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (*outs, *lses)]
        with mock.patch.object(merge, "_DEVICES", devices):
            found = merge_attention(leaves[:2], leaves[2:])
            arriving = dout.to(dtype), dlse.to(dtype)
            first = torch.autograd.grad(found, leaves, arriving, create_graph=True)
            second = torch.autograd.grad([x.sin().sum() for x in first], leaves, retain_graph=True)
            two = [torch.stack([x, 2 * x]) for x in arriving]
            return [*second, *torch.autograd.grad(found, leaves, two, is_grads_batched=True)]

    for got, want in zip(both(torch.float32, devices), both(torch.float64, ()), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64])
def test_fp64_is_merged_by_operations(dtype):
    given_ = parts_of(2, (1, 1, 4, 16), dtype, 0, False)
    with mock.patch.object(fused_merge, "merge", side_effect=AssertionError("fused")):
        results(*given_, devices=["cpu"])


@pytest.mark.parametrize("logit", [-torch.inf, 3e4])
def test_a_sink_of_a_query_without_keys_makes_nothing_of_nothing(logit):
    out, lse = torch.ones(1, 2, 2, 4, requires_grad=True), torch.tensor([[[0.0, -torch.inf]] * 2], requires_grad=True)
    logits = torch.full((2,), logit, requires_grad=True)
    masked = out.masked_fill(lse.unsqueeze(-1) == -torch.inf, 0.0)
    joined, joined_lse = merge.with_sink(masked, lse, logits)
    share = float(logit < 0)
    assert (joined[:, :, 0] == share).all() and (joined[:, :, 1] == 0).all()
    assert (joined_lse[:, :, 0] == max(logit, 0.0)).all() and (joined_lse[:, :, 1] == logit).all()
    gradients = torch.autograd.grad(joined.sum() + joined_lse.sum(), (out, lse, logits))
    wanted = [torch.tensor([share, 0.0]).expand(1, 2, 2), torch.full((2,), 2.0 * (1.0 - share))]
    assert torch.equal(gradients[0], wanted[0].unsqueeze(-1).expand(1, 2, 2, 4))
    assert torch.equal(gradients[1], wanted[0]) and torch.equal(gradients[2], wanted[1])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_torch_compile_makes_one_graph_of_it():
    outs, lses, dout, dlse = parts_of(3, (1, 2, 20, 16), torch.float32, 0, False)
    leaves = [x.requires_grad_() for x in (*outs, *lses)]
    torch.compiler.reset()
    compiled = torch.compile(lambda *x: merge_attention(x[:3], x[3:]), backend="aot_eager", fullgraph=True)
    got, want = (
        [*found, *torch.autograd.grad(found, leaves, (dout, dlse))]
        for found in (compiled(*leaves), merge_attention(outs, lses))
    )
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_gpu_merges_exactly(dtype):
    given_ = parts_of(3, (2, 4, 300, 64), dtype, 0, True)

    def on_gpu(x):
        return [each.cuda() for each in x] if isinstance(x, list) else x.cuda()

    outs, lses, dout, dlse = given_
    truth = results([x.double() for x in outs], [x.double() for x in lses], dout.double(), dlse.double())
    got = results(*map(on_gpu, given_), devices=["cuda"])
    got = {name: x.cpu() for name, x in got.items()}
    assert compare_results(got, truth, results(*given_), magnitudes={"lse": 16.0}).exact
