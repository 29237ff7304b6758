import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as theirs

from sparseflash import BlockMask, attention, masks, scores
from sparseflash.interop import flex_attention as module
from sparseflash.interop.flex_attention import create_block_mask, flex_attention

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called", "ignore:return_lse is deprecated")


def drawn(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def causal(b, h, q, k):
    return k <= q


def by_batch(b, h, q, k):
    return (q - k).abs() <= 9 - 4 * b


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


# With the slopes x and `d = q + Nk - Nq - k`.
SIGNED = {
    "added": lambda x, s, h, d: s + x[h] * -d,
    "taken away": lambda x, s, h, d: s - x[h] * d,
    "the difference first": lambda x, s, h, d: d * -x[h] + s,
    "a bias with a factor": lambda x, s, h, d: s + 0.5 * (-d).float() * x[h],
    "absolute": lambda x, s, h, d: s - x[h] * d.abs(),
}


def signed(form, x, q_len, k_len):
    return lambda s, b, h, q, k: SIGNED[form](x, s, h, -(k - q - (k_len - q_len)))


def with_kinds(*arguments):
    kinds = []

    def noted(*given, scores, **named):
        kinds.extend(scores.kinds)
        return attention(*given, scores=scores, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "attention", noted)
        return flex_attention(*arguments), kinds


def plain(mod, q, k, v, live):
    places = torch.meshgrid(*(torch.arange(n) for n in (*q.shape[:3], k.shape[2])), indexing="ij")
    scores = mod(q @ k.mT / q.shape[-1] ** 0.5, *places).masked_fill(~live, -torch.inf)
    return scores.softmax(-1).masked_fill(~live.any(-1, keepdim=True), 0) @ v


def alike(kind, mod, slopes, q, k, v, mask):
    live = mask.to_dense() if isinstance(mask, BlockMask) else theirs.create_mask(causal, 1, 1, 50, 50, device="cpu")
    (out, kinds), want = with_kinds(q, k, v, mod, mask), plain(mod, q, k, v, live)
    assert kinds == [kind]
    torch.testing.assert_close(out, want)
    if slopes.requires_grad:
        (a,), (b,) = (torch.autograd.grad(x.square().sum(), slopes) for x in (out, want))
        torch.testing.assert_close(a, b)


CAUSAL = {
    "ours": lambda: masks.causal(50, block=16),
    "theirs": lambda: theirs.create_block_mask(causal, None, None, 50, 50, device="cpu", BLOCK_SIZE=16),
    "a window of each head": lambda: masks.per_head([masks.local(50, window=w, causal=True, block=16) for w in (3, 9)]),
    "padded": lambda: masks.causal(50, block=16).with_lengths([30, 50]),
    "more keys": lambda: masks.causal(30, 50, block=16),
    "fewer keys": lambda: masks.causal(50, 30, block=16),
}


@pytest.mark.parametrize("form", SIGNED)
@pytest.mark.parametrize("name", CAUSAL)
def test_signed_distances_under_a_causal_mask_are_alibi_with_learned_slopes(name, form):
    mask = CAUSAL[name]()
    q_len, k_len = mask.shape[2:]
    slopes, q, k, v = drawn((3,), (2, 2, q_len, 16), (2, 2, k_len, 16), (2, 2, k_len, 8))
    mod = signed(form, slopes.requires_grad_(), q_len, k_len)
    alike("distance", mod, slopes, q, k, v, mask)


OTHERS = {
    "one score too many": lambda: masks.causal(50, block=16) | BlockMask.from_function(
        lambda q, k: (q == 20) & (k == 21), 50, block=16
    ),
    "dense": lambda: masks.dense(50, block=16),
    "one head": lambda: masks.per_head([masks.causal(50, block=16), masks.local(50, window=3, block=16)]),
    "one batch element": lambda: masks.per_batch([masks.causal(50, block=16), masks.causal(50, offset=1, block=16)]),
    "aligned elsewhere": lambda: masks.causal(30, 50, offset=21, block=16),
}  # fmt: skip


@pytest.mark.parametrize("form", sorted(SIGNED.keys() - {"absolute"}))
@pytest.mark.parametrize("name", OTHERS)
def test_signed_distances_under_another_mask_are_no_alibi(name, form):
    mask = OTHERS[name]()
    q_len, k_len = mask.shape[2:]
    slopes, q, k, v = drawn((2,), (2, 2, q_len, 16), (2, 2, k_len, 16), (2, 2, k_len, 8))
    mod = signed(form, slopes, q_len, k_len)
    for other in (mask.with_lengths([1, 1]), mask):
        alike("function", mod, slopes, q, k, v, other)
    assert with_kinds(q, k, v, mod, None)[1] == ["function"]
    alike("function", signed(form, slopes.requires_grad_(), q_len, k_len), slopes, q, k, v, mask)


def test_the_contents_of_a_dynamic_mask_are_not_waited_for():
    slopes, q, k, v = drawn((2,), *[(1, 2, 50, 16)] * 3)
    index = torch.tensor([[0, 1], [0, 1], [0, 2], [1, 3]])[None, None]
    mask = BlockMask.from_block_index(index, block=16, q_len=50, causal=True)
    assert mask.dynamic
    alike("function", signed("added", slopes, 50, 50), slopes, q, k, v, mask)


def test_what_is_no_distance_from_a_key_to_its_query_is_no_alibi():
    q, k, v = drawn((1, 2, 30, 16), (1, 2, 50, 16), (1, 2, 50, 16))
    for mod in (
        lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
        lambda s, b, h, q, k: s + SLOPES[h] * (k - q - 21),
        lambda s, b, h, q, k: s + SLOPES[h] * (k + q),
        lambda s, b, h, q, k: s - SLOPES[h] * torch.log1p(q + 20 - k),  # NaN after the query
    ):
        assert with_kinds(q, k, v, mod, masks.causal(30, 50, offset=0))[1] == ["function"]


@given(data=st.data(), q_len=st.integers(1, 20), k_len=st.integers(1, 40), seed=st.integers(0, 999))
def test_signed_distances_are_right_under_any_mask(data, q_len, k_len, seed):
    generator = torch.Generator().manual_seed(seed)
    offset = data.draw(st.integers(-2, 2)) + k_len - q_len
    near = torch.rand(1, 2, q_len, k_len, generator=generator) < 0.6
    live = near & (torch.arange(k_len) <= torch.arange(q_len)[:, None] + offset)
    slopes, q, k, v = drawn((2,), (1, 2, q_len, 8), (1, 2, k_len, 8), (1, 2, k_len, 8), seed=seed)
    form = data.draw(st.sampled_from(sorted(SIGNED)))
    mask, mod = BlockMask.from_dense(live, block=16), signed(form, slopes, q_len, k_len)
    limit = torch.arange(k_len) <= torch.arange(q_len)[:, None] + k_len - q_len
    kind = "function" if form != "absolute" and bool((live & ~limit).any()) else "distance"
    alike(kind, mod, slopes, q, k, v, mask)


@pytest.mark.parametrize("is_made_before", [True, False])
def test_signed_distances_are_recognised_in_compiled_code(is_made_before):
    slopes, q, k, v = drawn((2,), *[(1, 2, 50, 16)] * 3)
    mod, mask = signed("added", slopes.requires_grad_(), 50, 50), masks.causal(50) if is_made_before else None
    compiled = torch.compile(
        lambda q: flex_attention(q, k, v, mod, masks.causal(50) if mask is None else mask), backend="eager"
    )
    torch.testing.assert_close(compiled(q), flex_attention(q, k, v, mod, masks.causal(50)))


Q = torch.zeros(1, 2, 8, 16)


def test_choices_of_their_kernels_change_nothing():
    want = flex_attention(Q, Q, Q)
    options = {"BLOCK_M": 64, "fwd_num_stages": 3, "bwd_BLOCK_N1": 32, "BACKEND": "TRITON"}
    assert torch.equal(flex_attention(Q, Q, Q, kernel_options=options), want)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: flex_attention(Q, Q[:, :1], Q[:, :1]), ValueError, "query must have as many heads as key unless"),
        (lambda: flex_attention(Q[0], Q, Q), ValueError, "query must have shape [batch, heads, tokens, head dim]; got"),
        (
            lambda: flex_attention(Q, Q, Q, kernel_options={"BLOCK_M": 64, "BLOCKM": 64}),
            ValueError,
            "waves_per_eu, for both ways or with fwd_ or bwd_; got 'BLOCKM'.",
        ),
        (
            lambda: create_block_mask(causal, None, None, 50, 50, device="cpu", BLOCK_SIZE=0),
            ValueError,
            "BLOCK_SIZE must be at least 1; got 0.",
        ),
        (
            lambda: flex_attention(Q, Q, Q, return_aux=theirs.AuxRequest(max_scores=True)),
            ValueError,
            "return_aux must be AuxRequest(lse=True), without return_lse and max_scores; got AuxRequest(lse=False, ",
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
