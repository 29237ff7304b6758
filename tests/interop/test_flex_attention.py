"""FlexAttention's functions by our kernels, against FlexAttention's own in eager mode."""

import re

import pytest
import torch
from torch.nn.attention import flex_attention as theirs

from sparseflash import BlockMask, masks, scores
from sparseflash.interop.flex_attention import create_block_mask, flex_attention

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called", "ignore:return_lse is deprecated")


def drawn(*shapes, seed=0):
    """Without gradients, which FlexAttention refuses on a CPU."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def causal(b, h, q, k):
    return k <= q


def near_by_head(b, h, q, k):
    return (q - k).abs() < 5 << h


def by_batch(b, h, q, k):
    return (q - k).abs() <= 9 - 4 * b


@pytest.mark.parametrize("mod", [causal, near_by_head, by_batch])
@pytest.mark.parametrize("sizes", [(None, None), (2, 4), (2, None), (None, 4)], ids=str)
def test_masks_are_those_of_flexattention(mod, sizes):
    if (mod is near_by_head and sizes[1] is None) or (mod is by_batch and sizes[0] is None):
        pytest.skip("the rule needs the number of heads or batch elements")
    ours = create_block_mask(mod, *sizes, 50, 70, device="cpu", BLOCK_SIZE=(16, 32))
    want = theirs.create_mask(mod, *sizes, 50, 70, device="cpu")
    assert isinstance(ours, BlockMask) and (ours.block_q, ours.block_k) == (16, 32)
    assert torch.equal(ours.to_dense().expand_as(want), want)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 1.0])
SCORE_MODS = {
    "none": None,
    "alibi": lambda score, b, h, q, k: score - SLOPES[h] * (q - k).abs(),
    "own": lambda score, b, h, q, k: torch.where(q % 2 == 0, score, 2 * score) + b,
}


@pytest.mark.parametrize("score_mod", SCORE_MODS)
@pytest.mark.parametrize("mask", ["none", "ours", "theirs"])
def test_the_function_is_flexattention(score_mod, mask):
    inputs = drawn((2, 4, 50, 16), (2, 2, 50, 16), (2, 2, 50, 8))
    flex = None if mask == "none" else theirs.create_block_mask(by_batch, 2, 4, 50, 50, device="cpu", BLOCK_SIZE=16)
    own = create_block_mask(by_batch, 2, 4, 50, 50, device="cpu", BLOCK_SIZE=16) if mask == "ours" else flex
    mod = SCORE_MODS[score_mod]
    out, lse = flex_attention(*inputs, mod, own, 0.3, True, True)
    want, want_lse = theirs.flex_attention(*inputs, mod, flex, 0.3, True, True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse.to(lse.dtype))


def test_one_list_for_all_serves_a_rule_of_heads():
    inputs = drawn(*[(2, 4, 50, 16)] * 3)
    flex = theirs.create_block_mask(near_by_head, None, 4, 50, 50, device="cpu", BLOCK_SIZE=16)
    torch.testing.assert_close(
        flex_attention(*inputs, block_mask=flex), theirs.flex_attention(*inputs, block_mask=flex)
    )


def test_a_mask_of_flexattention_is_converted_once(monkeypatch):
    inputs = drawn(*[(1, 2, 50, 16)] * 3)
    flex = theirs.create_block_mask(causal, None, None, 50, 50, device="cpu")
    first = flex_attention(*inputs, block_mask=flex)
    monkeypatch.delattr("sparseflash.interop.flex_attention.from_flex")
    assert torch.equal(first, flex_attention(*inputs, block_mask=flex))


def test_other_results_and_arguments():
    q, k, v = drawn((2, 2, 50, 16), (1, 2, 50, 16), (1, 2, 50, 16))
    flex = theirs.create_block_mask(by_batch, 2, None, 50, 50, device="cpu")
    torch.testing.assert_close(flex_attention(q, k, v, None, flex), theirs.flex_attention(q, k, v, None, flex))
    out, aux = flex_attention(q[:1], k, v, return_aux=theirs.AuxRequest(lse=True))
    want, want_aux = theirs.flex_attention(q[:1], k, v, return_aux=theirs.AuxRequest(lse=True))
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(aux.lse, want_aux.lse.to(aux.lse.dtype))
    assert aux.max_scores is None
    capped = flex_attention(q[:1], k, v, scores.softcap(2.0), masks.causal(50))
    mod = lambda score, b, h, q, k: 2.0 * torch.tanh(score / 2.0)  # noqa: E731
    torch.testing.assert_close(capped, flex_attention(q[:1], k, v, mod, masks.causal(50)))


def test_a_learned_tensor_that_a_score_mod_reads_gets_its_gradient_at_every_step():
    q, k, v, table = drawn((1, 2, 30, 16), (1, 2, 30, 16), (1, 2, 30, 16), (2, 59))
    table.requires_grad_()
    mod = lambda score, b, h, i, j: score + table[h, i - j + 29]  # noqa: E731
    bias = lambda: table[:, torch.arange(30)[:, None] - torch.arange(30) + 29]  # noqa: E731
    for _ in range(2):
        out = flex_attention(q, k, v, mod)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias()[None])
        torch.testing.assert_close(out, want)
        (a,), (b,) = (torch.autograd.grad(x.square().sum(), [table]) for x in (out, want))
        torch.testing.assert_close(a, b)
        with torch.no_grad():
            table -= 0.1 * a


Q = torch.zeros(1, 2, 8, 16)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: flex_attention(Q, Q[:, :1], Q[:, :1]), ValueError, "query must have as many heads as key unless"),
        (lambda: flex_attention(Q[0], Q, Q), ValueError, "query must have shape [batch, heads, tokens, head dim]; got"),
        (
            lambda: flex_attention(Q, Q, Q, kernel_options={"BLOCK_M": 64}),
            ValueError,
            "kernel_options must be None: tile sizes follow from the GPU and the mask; got {'BLOCK_M': 64}.",
        ),
        (
            lambda: flex_attention(Q, Q, Q, return_aux=theirs.AuxRequest(max_scores=True)),
            ValueError,
            "return_aux must be AuxRequest(lse=True), without return_lse and max_scores; got AuxRequest(lse=False, ",
        ),
        (
            lambda: create_block_mask(causal, None, None, 8, 8, _compile=True),
            ValueError,
            "_compile must be False: nothing needs to be compiled; got True.",
        ),
        (
            lambda: flex_attention(Q, Q, Q, block_mask="causal"),
            TypeError,
            "block_mask must be FlexAttention's BlockMask",
        ),
    ],
)
def test_what_cannot_be_taken_is_refused_in_a_sentence(call, error, words):
    with pytest.raises(error, match=re.escape(words)):
        call()
