import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflash import attention, clear_caches, scores
from sparseflash.interop import from_score_mod
from tests.drawn.rule_spellings import spelled

pytestmark = pytest.mark.filterwarnings("ignore:torch.searchsorted:UserWarning")

B, H, N = 2, 3, 20
ROWS = [0, 9, 16, 19]  # queries that are computed by single numbers
ARRAYS = [(H, N, N), (B, H, N, N), (H,), (B, 2), (H, 2 * N)]


def arrays(seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in ARRAYS]


def unpacked(s, b, h, q, k, bias, both, gain, two, table):
    scale, shift = two[b]
    return s * scale + shift


def unpacked_last(s, b, h, q, k, bias, both, gain, two, table):
    first, *_, last = bias[h, q]
    return s + first * last


RECORDED = {
    "bias[h][q, k]": lambda s, b, h, q, k, bias, both, gain, two, table: s + bias[h][q, k],
    "bias[h][q][k]": lambda s, b, h, q, k, bias, both, gain, two, table: s + bias[h][q][k],
    "bias[h, q][k]": lambda s, b, h, q, k, bias, both, gain, two, table: s - bias[h, q][k],
    "bias[:, q, k][h]": lambda s, b, h, q, k, bias, both, gain, two, table: s + bias[:, q, k][h],
    "bias[h, :, k][q]": lambda s, b, h, q, k, bias, both, gain, two, table: s + bias[h, :, k][q],
    "bias[..., k][h, q]": lambda s, b, h, q, k, bias, both, gain, two, table: s + bias[..., k][h, q],
    "both[b, h][q, k]": lambda s, b, h, q, k, bias, both, gain, two, table: s + both[b, h][q, k],
    "both[b][h][q][k]": lambda s, b, h, q, k, bias, both, gain, two, table: s + both[b][h][q][k],
    "both[0][h, q, k]": lambda s, b, h, q, k, bias, both, gain, two, table: s + both[0][h, q, k] * both[b, -1][q, k],
    "gain[h]": lambda s, b, h, q, k, bias, both, gain, two, table: s * gain[h],
    "gain.take(h)": lambda s, b, h, q, k, bias, both, gain, two, table: s * gain.take(h) + table[h].take(q + k),
    "two[b][0]": lambda s, b, h, q, k, bias, both, gain, two, table: s * two[b][0] + two[b, 1] * two[b][-1],
    "scale, shift = two[b]": unpacked,
    "first, *_, last = bias[h, q]": unpacked_last,
    "table[h][k - q + n]": lambda s, b, h, q, k, bias, both, gain, two, table: s + table[h][k - q + N],
    "where(h == 1)": lambda s, b, h, q, k, bias, both, gain, two, table: torch.where(h == 1, s * gain[h], s),
    "not of the score": lambda s, b, h, q, k, bias, both, gain, two, table: gain[h] * bias[h][q][k],
    "of the key alone": lambda s, b, h, q, k, bias, both, gain, two, table: k * 0.1,
}  # fmt: skip
MAPPED = {
    "two[b].max()": lambda s, b, h, q, k, bias, both, gain, two, table: s * two[b].max() + two[b].sum(),
    "(h == some).any()": lambda s, b, h, q, k, bias, both, gain, two, table: (
        torch.where((h == torch.tensor([0, 2])).any(), s, gain[h] - s)
    ),
    "stack(list)[h][q, k]": lambda s, b, h, q, k, bias, both, gain, two, table: s + torch.stack(list(bias))[h][q, k],
    "bias[h][q] @ bias[h][k]": lambda s, b, h, q, k, bias, both, gain, two, table: s + 0.1 * bias[h][q] @ bias[h][k],
    "gain.softmax(0)[h]": lambda s, b, h, q, k, bias, both, gain, two, table: s * gain.softmax(0)[h],
    "index_select": lambda s, b, h, q, k, bias, both, gain, two, table: s * gain.index_select(0, h.view(1))[0],
}  # fmt: skip
ALL = RECORDED | MAPPED


def inputs(dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, H, N, 16, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


def results(out, lse, leaves):
    learned = out.square().sum() + (lse.sum() if lse.requires_grad else 0.0)
    found = torch.autograd.grad(learned, leaves, allow_unused=True)
    return [out, lse, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found))]


def of_rows(out, lse):
    return out[:, :, ROWS], lse[:, :, ROWS]


def by_numbers(function, q, k, v, given_):
    products = q[:, :, ROWS] @ k.mT / 4
    rows = [
        function(products[b, h, n, j], *map(torch.tensor, (b, h, i, j)), *given_)
        for b in range(B)
        for h in range(H)
        for n, i in enumerate(ROWS)
        for j in range(N)
    ]
    changed = torch.stack([x.to(products.dtype).reshape(()) for x in rows]).view(products.shape)
    return changed.softmax(-1) @ v, changed.logsumexp(-1)


@pytest.mark.parametrize("name", ALL)
def test_every_spelling_has_the_values_and_gradients_of_single_numbers(name):
    qkv, given_ = inputs(), arrays()
    wanted = results(*by_numbers(ALL[name], *qkv, given_), [*qkv, *given_])
    for backend in ("reference", "blockwise"):
        change = scores.function(ALL[name], *given_)
        got = results(*of_rows(*attention(*qkv, scores=change, return_lse=True, backend=backend)), [*qkv, *given_])
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", RECORDED)
def test_every_spelling_that_is_recorded_is_one_of_the_kernels(name):
    qkv, given_ = inputs(torch.float32), arrays(dtype=torch.float32)
    change = scores.function(RECORDED[name], *given_)
    found = [
        results(*attention(*qkv, scores=change, return_lse=True, backend=backend), [*qkv, *given_])
        for backend in ("triton", "reference")
    ]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MAPPED)
def test_what_is_not_recorded_says_where_it_runs(name):
    qkv, change = inputs(torch.float32), scores.function(MAPPED[name], *arrays(dtype=torch.float32))
    with pytest.raises(
        ValueError, match=r"backend='blockwise' scores\.function runs any function that torch\.vmap can call"
    ):
        attention(*qkv, scores=change, backend="triton")


@pytest.mark.parametrize("name", RECORDED)
def test_a_score_mod_may_be_spelled_in_each_of_these_ways(name):
    qkv, given_ = inputs(), [x.detach() for x in arrays()]
    found = from_score_mod(lambda *at: RECORDED[name](*at, *given_), N)
    assert not name.startswith(("bias", "both[b")) or found.kinds == ("bias",)
    wanted = by_numbers(RECORDED[name], *qkv, given_)
    for one, other in zip(of_rows(*attention(*qkv, scores=found, return_lse=True)), wanted):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@given(rule=spelled(N, python=False), seed=st.integers(0, 99))
@settings(max_examples=20)
def test_drawn_conditions_of_scores_are_those_of_single_numbers(rule, seed):
    def change(s, b, h, q, k, bias, *_):
        return torch.where(rule(b, h, q, k), s * 0.5, bias[h][q, k] - s)

    qkv, given_ = inputs(seed=seed), arrays(seed)
    wanted = results(*by_numbers(change, *qkv, given_), [*qkv, *given_])
    clear_caches()
    for backend in ("reference", "blockwise"):
        own = scores.function(change, *given_)
        got = results(*of_rows(*attention(*qkv, scores=own, return_lse=True, backend=backend)), [*qkv, *given_])
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
