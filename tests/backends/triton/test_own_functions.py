import linecache
import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch.nn.functional import softplus

from sparseflash import attention, clear_caches, masks, scores
from sparseflash.backends.triton.changes import own
from sparseflash.backends.triton.changes.own import Made
from sparseflash.backends.triton.changes.own_source import Load

CPU = torch.device("cpu")


def tensors(tokens=16, heads=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, tokens, 16, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


def compare(change, *learned, mask=None, backend="triton"):
    q, k, v = tensors()
    found = []
    for each in (backend, "blockwise"):
        out, lse = attention(q, k, v, mask, scores=change, return_lse=True, backend=each)
        found.append([out, lse, *torch.autograd.grad(out.sin().sum() + lse.sum(), (q, k, v, *learned))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


def compare_out(change, q, k, v, mask=None):
    found, want = (attention(q, k, v, mask, scores=change, backend=backend) for backend in ("triton", "blockwise"))
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


ARITHMETIC = {
    "exponentials": lambda s, b, h, q, k: (-s * s).exp() + (1 + s * s).log() + (s * s).log1p() + torch.exp2(-s.abs()),
    "roots and angles": lambda s, b, h, q, k: (1 + s * s).sqrt() + s.sin() * s.cos() + (1 + s.abs()) ** -1.5,
    "sigmoids": lambda s, b, h, q, k: (9 * s).sigmoid() + softplus(9 * s) + s.tanh() + (-s).relu(),
    "choices": lambda s, b, h, q, k: torch.maximum(s.clamp(-0.5, 0.7), 0.1 * s).masked_fill((q > k) & (h == 1), 0.25),
    "steps": lambda s, b, h, q, k: s.floor() + s.ceil() * s.sign() + s * (s > 0.1) + s % 0.75 + s.int(),
    "detached": lambda s, b, h, q, k: s * s.tanh() + (s.tanh() - s).detach(),
    "bools": lambda s, b, h, q, k: s * ((q > k) + (q > 3)) + torch.where(~((q > k) * (h == 0)), s, 2 * s),
    "integers": lambda s, b, h, q, k: s + (q - 9) // 4 + (k - q) % 5 - (q - k) // -3 + ((q ^ k) & 3 | 8) + ~(q < k),
}


@pytest.mark.parametrize("exponent", [2, 3, 17, 1.5, 1.3, 20.25, -1, -2, -3, -1.5, -0.3])
def test_powers_are_pytorchs_at_zero_and_below(exponent):
    """A score may be 0; negative bases only have whole powers."""
    bases = torch.tensor([0.0, 0.3, 0.8, 1.0, 1.7] + [-0.4, -1.0, -1.6] * float(exponent).is_integer())
    q, k, v = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, len(bases), 16), torch.zeros(1, 1, len(bases), 16)
    q[..., 0], k[..., 0], v[..., 0] = 1.0, bases, torch.arange(len(bases))

    own = scores.function(lambda s, b, h, q, k: (s**exponent).clamp(-5, 5))
    values = {}
    with np.errstate(all="ignore"):
        for backend in ("triton", "blockwise"):
            leaf = k.clone().requires_grad_()
            out, lse = attention(q, leaf, v, scale=1.0, scores=own, backend=backend, return_lse=True)
            values[backend] = out, lse, *torch.autograd.grad(out.sum() + lse.sum(), leaf)
    for one, other in zip(values["triton"], values["blockwise"], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize(("backend", "padded"), [("triton", False), ("triton", True), ("blockwise", False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_slopes_of_scores_that_do_not_exist_may_be_infinite(dtype, backend, padded):
    """Tiles are padded with zeros, where a root has an infinite slope."""
    length, tokens = 15, 20 if padded else 15
    generator = torch.Generator().manual_seed(3)
    learned = [torch.randn(2, n, generator=generator).requires_grad_() for n in (tokens, tokens, 3)]

    def own(score, b, h, q, k, of_queries, of_keys, table):
        root = score.abs().sqrt()
        return root * of_queries[h, q] + root * of_keys[h, k] + root * table[h, (k - q).clamp(-1, 1) + 1]

    def results(backend, q, k, v, mask):
        change = scores.function(own, *learned)
        with np.errstate(all="ignore"):
            out, lse = attention(q, k, v, mask, scores=change, return_lse=True, backend=backend)
            total = out[:, :, :length].float().sin().sum() + lse[:, :, :length].sum()
            found = torch.autograd.grad(total, (q, k, v, *learned))
        return [x[:, :, :length].float() for x in (out, lse, *found[:3])] + list(found[3:])

    q, k, v = (x.detach() for x in tensors(tokens, dtype=dtype))
    q[:, :, length:], k[:, :, length:] = 0, 0
    mask = masks.causal(tokens, block=16)
    got = results(backend, *(x.requires_grad_() for x in (q, k, v)), mask.with_lengths([length]) if padded else mask)
    cut = [x[:, :, :length].detach().requires_grad_() for x in (q, k, v)]
    wanted = results("reference", *cut, masks.causal(length, block=16))
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ARITHMETIC)
def test_operations_are_pytorchs(name):
    compare(scores.function(ARITHMETIC[name]))


def test_captured_tensors_and_numbers_are_read_also_from_the_end():
    documents, weights, one = torch.arange(20) // 7, torch.rand(3, 30, dtype=torch.float64), torch.tensor(0.5)

    def own(score, b, h, q, k):
        return torch.where(documents[q] == documents[k - 20], score, score * one - weights[h, k])

    compare(scores.function(own))


VIEWS = {
    "columns": lambda x: torch.nn.functional.pad(x, (1, 2), value=torch.nan)[..., 1:-2],
    "every second": lambda x: torch.stack([x + torch.nan, x], -1)[..., 1],
    "one entry, expanded": lambda x: torch.nn.functional.pad(x, (1, 0))[..., 1:2].expand(x.shape),
    "turned": lambda x: torch.nn.functional.pad(x.mT, (3, 1), value=torch.nan)[..., 3:-1].mT,
}


@pytest.mark.parametrize("is_given", [True, False], ids=["given", "captured"])
@pytest.mark.parametrize("name", VIEWS)
def test_tensors_may_be_views_that_begin_anywhere(name, is_given):
    generator = torch.Generator().manual_seed(0)
    views = [VIEWS[name](torch.randn(2, n, generator=generator)).detach() for n in (16, 16, 7)]
    assert all(x.data_ptr() % 16 for x in views)

    def own(score, b, h, q, k, of_queries, of_keys, table):
        return score * of_keys[h, k] + of_queries[h, q] + table[h, (k - q).clamp(-3, 3) + 3]

    if is_given:
        compare(scores.function(own, *(x.requires_grad_() for x in views)), *views)
    else:
        compare(scores.function(lambda *at: own(*at, *views)))


def test_a_longer_learned_tensor_and_one_of_a_number_get_their_gradients():
    shift, factor = torch.randn(4, 1, 30, requires_grad=True), torch.tensor([0.5, 2.0], requires_grad=True)
    unread, number = torch.ones(3, requires_grad=True), torch.tensor(0.7, requires_grad=True)

    def own(score, b, h, q, k, shift, factor, unread, number):
        return score * factor[1] + shift[h, b, q] * number

    learned = shift, factor, unread, number
    compare(scores.function(own, *learned), *learned)


def test_an_entry_outside_its_tensor_makes_the_score_nan():
    own = scores.function(lambda s, b, h, q, k, table: s + table[q + 1], torch.zeros(16))
    out = attention(*tensors(), scores=own, backend="triton")
    assert out[:, :, :15].isfinite().all() and out[:, :, 15].isnan().all()


def test_a_given_derivative_takes_the_place_of_ones_own():
    compare(scores.function(lambda s, b, h, q, k: s.floor(), derivative=lambda s, b, h, q, k: 1 - 0.5 * s.tanh()))


@triton.jit
def damped(score, b, h, q, k, gain_ptr):
    return score * tl.load(gain_ptr + h) - 0.1 * tl.abs(q - k)


@triton.jit
def damped_derivative(score, b, h, q, k, gain_ptr):
    return tl.load(gain_ptr + h)


def in_pytorch(score, b, h, q, k, gain):
    return score * gain[h] - 0.1 * (q - k).abs()


def test_a_function_written_in_triton_is_called_instead():
    gain = torch.tensor([0.5, 2.0])
    own = scores.function(in_pytorch, gain, kernel=damped, kernel_derivative=damped_derivative)
    compare(own, mask=masks.causal(16, block=16))
    forward_only = scores.function(in_pytorch, gain, kernel=damped)
    out = attention(*tensors(), scores=forward_only, backend="triton")
    with pytest.raises(ValueError, match="must have a kernel_derivative for the backward of its kernel"):
        out.sum().backward()
    learned = scores.function(in_pytorch, gain.requires_grad_(), kernel=damped, kernel_derivative=damped_derivative)
    with pytest.raises(
        ValueError, match="must be without kernel= if its tensors are learned; got a kernel and tensor 0"
    ):
        attention(*tensors(), scores=learned, backend="triton").sum().backward()


FAR = torch.empty(9, 2**28, dtype=torch.bool)[:, :16]
LARGE = torch.ones(4000, 40, requires_grad=True)


@pytest.mark.parametrize(
    ("function", "given", "text"),
    [
        (lambda s, b, h, q, k: s - s.mean(-1, keepdim=True), (), "must consist of operations on single numbers"),
        (lambda s, b, h, q, k, x: s + x[q], (torch.ones(9),), "must have an entry for each q that indexes it, 16 in"),
        (lambda s, b, h, q, k, x: s * x[h * 3000, q * 2], (LARGE,), "16,384 entries"),
        (lambda s, b, h, q, k, x: s + x[q // 2, k], (FAR,), "2^31 entries"),
    ],
)  # fmt: skip
def test_what_the_kernels_do_not_take(function, given, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        attention(*tensors(), scores=scores.function(function, *given), backend="triton").sum().backward()


def test_equal_functions_share_their_compiled_code_and_masks_have_no_part_in_it():
    def made(bound):
        return Made(
            scores.function(lambda s, b, h, q, k: s.clamp(-bound, bound)), dict(zip("bhqk", (1, 2, 16, 16))), CPU, []
        )

    assert made(1.0).changed is made(1.0).changed
    assert made(1.0).changed is not made(2.0).changed


def sources():
    return [name for name in linecache.cache if name.startswith("sparseflash_own_")]


def test_the_sources_of_functions_go_with_them(monkeypatch):
    def made(bound):
        change = scores.function(lambda s, b, h, q, k: s.clamp(max=bound))
        return Made(change, dict(zip("bhqk", (1, 2, 16, 16))), CPU, [])

    clear_caches()
    monkeypatch.setattr(own._made, "most", 2)
    for bound in (1.5, 2.5, 3.5):
        made(bound)
        assert len(sources()) == len(own._made) <= 2
    clear_caches()
    assert not sources() and not own._made


def test_a_call_may_outlive_the_functions_in_the_cache():
    gain = torch.ones(2, requires_grad=True)
    change = scores.function(lambda s, b, h, q, k, gain: s * gain[h] + 0.125 * gain[h] * s.tanh(), gain)
    q, k, v = tensors()
    found = []
    for cleared in (True, False):
        out = attention(q, k, v, scores=change, backend="triton")
        if cleared:
            clear_caches()
        found.append(torch.autograd.grad(out.sin().sum(), (q, k, v, gain)))
    assert all(map(torch.equal, *found))


def test_the_gradient_of_a_read_is_put_where_it_was_read():
    x = torch.zeros(4, 3, 5)
    of_queries = Load(0, "queries", ("q", 2, "h")).gradient(torch.ones(2, 5, 4), x)
    assert (of_queries[:, 2] == 2).all() and of_queries.sum() == 2 * 20
    of_table = Load(0, "table", ("h", "entry", "entry")).gradient(torch.arange(2.0 * 4 * 15).view(2, 4, 15), x)
    assert torch.equal(of_table, torch.arange(120.0).view(2, 4, 3, 5).sum(0))


@pytest.mark.parametrize(
    "added",
    [
        lambda q, k: k * 3_000_001 % 1000,
        lambda q, k: (k * k * 9_999 - q) % 1000,
        lambda q, k: k**4 // 1_000_000_000,
        lambda q, k: -(k * -3_000_000) // 100_000_000,
        lambda q, k: (k * 2_000_000 + (q + k) * 2_000_000) % 77,
        lambda q, k: torch.where(k > 100, k * 7_000_000, q).abs() // 100_000_000,
    ],
)
def test_integers_of_positions_have_64_bits_where_they_need_them(added):
    """In 32 bits these products would wrap around."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 16, generator=generator) for n in (16, 900, 900))
    change = scores.function(lambda s, b, h, q, k: s + added(q, k) / 100)
    mask = masks.local(16, 900, window=30, causal=True, block=16)
    compare_out(change, q, k, v, mask)


@pytest.mark.parametrize("divisor", [1.3, -1.3, 0.1, 0.7])
@pytest.mark.parametrize("operation", [torch.remainder, torch.floor_divide])
def test_remainders_just_below_a_multiple_are_pytorchs(operation, divisor):
    """In fp32 9.1 / 1.3 is 7, but 9.1 is less than 7 * 1.3."""
    compare(scores.function(lambda s, b, h, q, k: s + operation((k - 2 * q) * abs(divisor), divisor)))


LOWEST_32 = torch.iinfo(torch.int32).min


@pytest.mark.parametrize(
    ("numbers", "added"),
    [
        (torch.arange(900) % 2 * 2**32, lambda x, q, k: (x[q] == x[k]) * 5.0),
        (torch.arange(900) % 3 * 2**40, lambda x, q, k: (x[k] // 2**40) * 1.0),
        ((torch.arange(900) * 2_000_000).int(), lambda x, q, k: (x[k] * k % 1000) / 100.0),
        (torch.full((900,), LOWEST_32, dtype=torch.int32), lambda x, q, k: (k - x[q] > 100) * 5.0),
        (torch.arange(900) * 2_000_000, lambda x, q, k: ((x[k] + x[q] + x[k]) % 1000) / 100.0),
        (torch.arange(900) - 2**33, lambda x, q, k: (-x[k] > 2**33 - 400) * 5.0),
    ],
)
def test_integers_of_tensors_have_the_bits_that_pytorch_gives_them(numbers, added):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 16, generator=generator) for n in (16, 900, 900))
    mask = masks.local(16, 900, window=30, causal=True, block=16)
    for x in (numbers, numbers % 97 if numbers.dtype == torch.int64 else numbers):
        change = scores.function(lambda s, b, h, q, k, x: s + added(x, q, k), x)
        compare_out(change, q, k, v, mask)


@pytest.mark.parametrize(
    "added",
    [
        lambda q, k: torch.where(k < 2**40, 5.0, 0.0),
        lambda q, k: (q - k >= -(2**33)) * 5.0,
        lambda q, k: (q == 2**31) * 5.0,
        lambda q, k: k.clamp(max=2**40) * 0.1,
        lambda q, k: torch.where(k < 5, 2**33, k) * 1e-9,
        lambda q, k: (k % 2**40 + k // 2**40 + (k & (2**40 + 1))) * 0.1,
    ],
)
def test_a_number_of_more_than_32_bits_may_stand_beside_a_position(added):
    q = torch.randn(1, 1, 32, 16, generator=torch.Generator().manual_seed(0))
    change = scores.function(lambda s, b, h, q, k: s + added(q, k))
    found, want = (attention(q, q, q, scores=change, backend=backend) for backend in ("triton", "blockwise"))
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


def test_the_code_of_a_function_is_not_shared_by_integers_of_32_and_64_bits():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 32, 16, generator=generator)

    def added(s, b, h, q, k, x):
        return torch.where(x[q] == x[k], s, s - 5.0)

    for x in (torch.arange(32, dtype=torch.int32) % 2, torch.arange(32) % 2 * 2**32):
        change = scores.function(added, x)
        compare_out(change, q, q, q)


NARROW = torch.randint(-(2**31), 2**31, (32,), generator=torch.Generator().manual_seed(0))
NARROW[::3] = -1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "added",
    [
        lambda x, q, k: x[q] - x[k],
        lambda x, q, k: (x[q] + x[k]) // 3,
        lambda x, q, k: x[q] * 3 - x[k] * x[q],
        lambda x, q, k: -x[q] + ~x[k],
        lambda x, q, k: (x[q] - 5) ** 2,
        lambda x, q, k: (x[q] - x[k] > 0) * 1000,
        lambda x, q, k: x[q] * torch.tensor(1_000_003) % 100,
        lambda x, q, k: x[q].long() * 1_000_003 * x[k].long() % 100,
        lambda x, q, k: x[q] * 3 * k,
        lambda x, q, k: (q.to(x.dtype) * 101 - k.to(x.dtype) * 10_007) // 3,
        lambda x, q, k: x[q].int() * 65_537 * x[k] % 1000,
        lambda x, q, k: torch.where(q > k, x[q], x[k]) * torch.where(q > k, 1_000_003, 1_000_007) % 100,
        lambda x, q, k: (q > k).long() * 2_000_000_000 * 2 + torch.sign(k - q) * 2_000_000_000 * 3,
        lambda x, q, k: (x[q] / 3).to(torch.int64) * 1_000_000_007 % 1000,
        lambda x, q, k: (x[q] > -1) * 10 + (x[k] == -1) * 20,
        lambda x, q, k: x[q] % 300 + x[k] // 1_000_007,
        lambda x, q, k: (x[q] + 2**31 - 1) ** 2 * (2**31 + 3),
    ],
)
def test_integers_wrap_around_where_pytorchs_do(added, dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 32, 16, generator=generator) for _ in range(3))
    x = NARROW.to(dtype)
    compare_out(scores.function(lambda s, b, h, q, k: s + added(x, q, k) % 97 * 0.02), q, k, v)


@pytest.mark.timeout(60)
def test_a_value_that_is_used_twice_at_each_step_is_looked_at_once():
    """Walked once for each use, 40 doublings take 2^40 steps."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 32, 16, generator=generator)
    x = torch.arange(32) % 2

    def added(s, b, h, q, k, x):
        doubled = x[q]
        for _ in range(40):
            doubled = doubled + doubled
        return s + (doubled % 3) * 0.1

    compare_out(scores.function(added, x), q, q, q)
