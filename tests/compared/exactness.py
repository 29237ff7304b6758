from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
from hypothesis import settings

from sparseflash import BlockMask, attention, testing
from sparseflash.backends import reference
from sparseflash.backends.triton.overrides import override
from tests.compared.closeness import Results, assert_exact
from tests.drawn.masks import Recipe
from tests.drawn.problems import Problem

HALF = (torch.float16, torch.bfloat16)
LARGE_SCORES = (1e3, 1e4, 1e5, 1e6)  # `attention` states the error of half-precision gradients up to here


@contextmanager
def new_memory_is_nan():
    """Otherwise new memory is often zeros on the CPU."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def time_for_examples(seconds):
    return seconds * max(1.0, settings().max_examples / 25)


def results(problem, backend, device, dtype=None):
    q, k, v, dout, dlse = problem.tensors(device)
    if dtype is not None:
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
        dout, dlse = dout.to(dtype), dlse.to(torch.promote_types(dtype, torch.float32))
    mask = problem.mask if problem.mask is None else problem.mask.to(device)
    out, lse = attention(
        q, k, v, mask, scale=problem.scale, return_lse=True, dropout_p=problem.dropout_p, seed=problem.seed,
        backend=backend,
    )  # fmt: skip
    return Results(out, lse, *torch.autograd.grad((out, lse), (q, k, v), (dout, dlse)))


class TF32Product(torch.autograd.Function):
    """A product whose operands keep 10 bits of their mantissas, as in the matrix units, forward and backward."""

    @staticmethod
    def forward(ctx, a, b):
        a, b = cut_to_tf32(a), cut_to_tf32(b)
        ctx.save_for_backward(a, b)
        return torch.matmul(a, b)

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        gradient = cut_to_tf32(gradient)
        return torch.matmul(gradient, b.mT), torch.matmul(a.mT, gradient)


def cut_to_tf32(x):
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def plain_attention(q, k, v, mask, scale, dropout=None, changes=None):
    """`reference.attention` with every step in the inputs' own dtype."""
    live = None if mask is None else mask.to_dense()
    return reference.attention_of_live(q, k, v, live, scale, dropout, changes)


def plain():
    return mock.patch.object(reference, "attention", plain_attention)


def plain_results(problem, device, arithmetic):
    if arithmetic != "tf32":
        with plain():
            return results(problem, "reference", device)
    with mock.patch.object(torch.Tensor, "__matmul__", lambda a, b: TF32Product.apply(a, b)):
        return results(problem, "reference", device)


def plain_draws(problem, device, arithmetic, truth=None):
    """Results of the plain implementation and the truth, by name, for at least four draws; and the factor of its
    errors."""
    dtype, factor = testing.plain_dtype(problem.dtype)
    if truth is None:
        truth = results(problem, "reference", device, torch.float64)
    queries = testing.live_queries(truth.out)
    count = max(4, testing.draws_for(queries, queries * problem.k_len))
    draws = [replace(problem, seed=problem.seed + number, dtype=dtype) for number in range(count)]

    def true(draw):
        return truth if draw == problem else results(draw, "reference", device, torch.float64)

    return ((plain_results(draw, device, arithmetic)._asdict(), true(draw)._asdict()) for draw in draws), factor


def check(problem, backend, device="cpu", arithmetic=None):
    # Weights past a sequence's end may be too large for fp16.
    with np.errstate(over="ignore", invalid="ignore"):
        got = results(problem, backend, device)
    check_results(problem, got, backend, device, arithmetic)


def check_results(problem, got, backend, device="cpu", arithmetic=None):
    truth = results(problem, "reference", device, torch.float64)
    label = {
        "backend": backend,
        "device": device,
        "dtype": arithmetic or str(problem.dtype).removeprefix("torch."),
        "dim": problem.dim,
        "v_dim": problem.v_dim,
        "tokens": max(problem.q_len, problem.k_len),
        "problem": repr(problem),
    }
    draws, factor = plain_draws(problem, device, arithmetic, truth)
    assert_exact(got, truth, draws, factor, label, score_magnitude(problem))


def score_magnitude(problem):
    q, k = (x.detach().double().abs() for x in problem.tensors()[:2])
    k = k.repeat_interleave(problem.heads // problem.kv_heads, dim=1)
    scale = problem.dim**-0.5 if problem.scale is None else abs(problem.scale)
    return scale * (q @ k.mT).max().item()


def loads(way):
    return override(descriptors=way == "descriptors")


def spread_out(dim, dtype, tokens=200, lengths=(200, 141), block=128, seed=7):
    arguments = {"q_len": tokens, "k_len": tokens, "block": (block, block), "heads": [[0, 1]], "holes": "none",
                 "patterns": [["full", "dead"], ["upper", "random"]], "seed": seed}  # fmt: skip
    return Problem(
        Recipe("from_dense", arguments, lengths), batch=len(lengths), heads=2, kv_heads=1, q_len=tokens, k_len=tokens,
        dim=dim, v_dim=dim, dtype=dtype, scale=None, layout="tokens first", seed=seed,
    )  # fmt: skip


# The smallest problem with blocks as large as the largest tile of the tables.
HALF_SIZES = {"tokens": 136, "lengths": (131,), "block": 128}


FP32_SIZES = {"tokens": 72, "lengths": (69,), "block": 64, "seed": 3}


WIDE_FP32_SIZES = {"tokens": 40, "lengths": (37,), "block": 32, "seed": 8}


def sizes_for(arithmetic, dim):
    if arithmetic == "half":
        return HALF_SIZES
    return WIDE_FP32_SIZES if arithmetic == "fp32" and dim >= 128 else FP32_SIZES


def gradients_by(backend):

    def gradients_of(q, k, v, dout, mask, scale):
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        return torch.autograd.grad(attention(q, k, v, mask, scale=scale, backend=backend), (q, k, v), dout)

    return gradients_of


def check_weights_of_one(largest, gradients_of, dim=64, device="cpu"):
    """Checks dv of queries with one key, whose weight is 1.

    Allowed: `largest` times 2^-20 for the score, and the rounding of dv to fp16.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 48, dim, generator=generator).half().to(device) for _ in range(4))
    mask = BlockMask.from_dense(torch.eye(48, dtype=torch.bool), block=128).to(device)
    scale = largest / float((q.double() * k.double()).sum(-1).abs().max())
    with np.errstate(over="ignore"):
        dq, dk, dv = gradients_of(q, k, v, dout, mask, scale)
    torch.testing.assert_close(dv, dout, rtol=largest * 2**-20 + 2**-11, atol=0)
    assert bool(dq.isfinite().all()) and bool(dk.isfinite().all())
