"""PyTorch's operations and the kernels, here in Triton's interpreter, merge parts of attention alike."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import distributed
from sparseflash.distributed import fused_merge, merge
from sparseflash.testing import compare_results


def parts_of(count, shape, dtype, seed, heads_inside):
    """Parts; some have no keys for some queries, and none has keys for one query. out in either common layout."""
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
        out, lse = distributed.merged(list(zip(leaves[: len(outs)], leaves[len(outs) :], strict=True)))
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


def test_there_must_be_a_part():
    with pytest.raises(ValueError, match=r"parts must be of at least one set of keys; got none"):
        distributed.merged([])


@pytest.mark.parametrize("dtype", [torch.float64])
def test_fp64_is_merged_by_operations(dtype):
    given_ = parts_of(2, (1, 1, 4, 16), dtype, 0, False)
    with mock.patch.object(fused_merge, "merge", side_effect=AssertionError("fused")):
        results(*given_, devices=["cpu"])


@pytest.mark.parametrize("logit", [-torch.inf, 3e4])
def test_a_sink_of_a_query_without_keys_makes_nothing_of_nothing(logit):
    """And a sink of -inf has no effect."""
    out, lse = torch.ones(1, 2, 2, 4, requires_grad=True), torch.tensor([[[0.0, -torch.inf]] * 2], requires_grad=True)
    logits = torch.full((2,), logit, requires_grad=True)
    masked = out.masked_fill(lse.unsqueeze(-1) == -torch.inf, 0.0)
    joined, joined_lse = merge.with_sink(masked, lse, logits)
    share = float(logit < 0)
    assert (joined[:, :, 0] == share).all() and (joined[:, :, 1] == 0).all()
    assert (joined_lse[:, :, 0] == max(logit, 0.0)).all() and joined_lse[:, :, 1].isneginf().all()
    gradients = torch.autograd.grad(joined.sum() + joined_lse[:, :, 0].sum(), (out, lse, logits))
    wanted = [torch.tensor([share, 0.0]).expand(1, 2, 2), torch.full((2,), 1.0 - share)]
    assert torch.equal(gradients[0], wanted[0].unsqueeze(-1).expand(1, 2, 2, 4))
    assert torch.equal(gradients[1], wanted[0]) and torch.equal(gradients[2], wanted[1])
