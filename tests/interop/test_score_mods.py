import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import attention, scores
from sparseflash.interop import from_score_mod

generator = torch.Generator().manual_seed(0)
SLOPES, PAIRS, KEYS, ROWS = (torch.randn(n, generator=generator) for n in ((2,), (2, 20, 20), (20, 2), (2, 20)))
TABLE, SHORT, EMBEDDING = (torch.randn(n, generator=generator) for n in ((2, 39), (2, 5), (5, 2)))
BUCKETS = scores.t5_buckets(5, 12, bidirectional=False)(torch.arange(-19, 20))
PAIR_BUCKETS = BUCKETS[torch.arange(20)[:, None] - torch.arange(20) + 19]
PLACES = torch.arange(20)


def t5_bucket(offset):
    distance = offset.abs()
    far = 2 + (torch.log(distance.clamp(min=1).float() / 2) / 2.5 * 2).to(torch.int64)
    return torch.where(distance < 2, distance, far.clamp(max=4))


MODS = {
    "alibi": (lambda s, b, h, q, k: s + SLOPES[h] * (q - k).abs(), ("distance",)),
    "alibi of numbers": (lambda s, b, h, q, k: s - (k - q).float().abs() * SLOPES[h], ("distance",)),
    "alibi with a number": (lambda s, b, h, q, k: s - 0.5 * SLOPES[h] * -(q - k).abs(), ("distance",)),
    "alibi, negative twice": (lambda s, b, h, q, k: s + (-(q - k).abs() * -SLOPES[h]), ("distance",)),
    "log decay": (lambda s, b, h, q, k: s - SLOPES[h] * torch.log1p((q - k).abs()), ("distance",)),
    "softcap": (lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20), ("softcap",)),
    "softcap by the inverse": (lambda s, b, h, q, k: 30.0 * torch.tanh(s * (1 / 30)), ("softcap",)),
    "capped and biased": (lambda s, b, h, q, k: torch.tanh(s / 20) * 20 + PAIRS[h, k, q], ("softcap", "bias")),
    "temperature": (lambda s, b, h, q, k: s / SLOPES[h], ("temperature",)),
    "temperature of queries": (
        lambda s, b, h, q, k: 20 * torch.tanh(s / ROWS[h, q] / 20) + SLOPES[h] * (q - k).abs(),
        ("temperature", "softcap", "distance"),
    ),
    "keys": (lambda s, b, h, q, k: KEYS[k, h] + s, ("key_bias",)),
    "heads": (lambda s, b, h, q, k: s - SLOPES[h], ("bias",)),
    "queries and keys": (lambda s, b, h, q, k: s - KEYS[k, h] + ROWS[h, q], ("key_bias", "bias")),
    "offsets": (lambda s, b, h, q, k: s + TABLE[h, k - q + 19], ("relative",)),
    "offsets, written otherwise": (lambda s, b, h, q, k: s - TABLE[h, (20 + q) - (k + 1)], ("relative",)),
    "offsets that wrap around": (lambda s, b, h, q, k: s + TABLE[h, q - k], ("relative",)),
    "offsets of numbers": (lambda s, b, h, q, k: s + TABLE[h, (q.float() - k.float()).int()], ("relative",)),
    "clipped": (lambda s, b, h, q, k: s + SHORT[h, (k - q).clamp(-2, 2) + 2] + KEYS[k, h], ("relative", "key_bias")),
    "an embedding": (lambda s, b, h, q, k: s + EMBEDDING[t5_bucket(k - q), h], ("relative",)),
    "buckets": (lambda s, b, h, q, k: s + SHORT[h, BUCKETS[q - k + 19]], ("relative",)),
    "buckets of pairs": (lambda s, b, h, q, k: s + SHORT[h, PAIR_BUCKETS[q, k]], ("relative",)),
    "buckets of pairs, transposed": (lambda s, b, h, q, k: s + SHORT[h, PAIR_BUCKETS[k, q]], ("relative",)),
    "offsets of places": (lambda s, b, h, q, k: s + TABLE[h, PLACES[q] - PLACES[k] + 19], ("function",)),
    "a matrix of other pairs": (lambda s, b, h, q, k: s + SHORT[h, PAIR_BUCKETS[q, 19 - k]], ("function",)),
    "sums of positions": (lambda s, b, h, q, k: s + TABLE[h, q + k], ("function",)),
    "one position": (lambda s, b, h, q, k: s + TABLE[h, (q - k + k // 2).clamp(0)], ("function",)),
    "entries of no head": (lambda s, b, h, q, k: s + TABLE[0, q - k], ("function",)),
    "two tables": (lambda s, b, h, q, k: s + TABLE[h, q - k] + SHORT[h, BUCKETS[q - k]], ("function",)),
    "signed distance": (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), ("function",)),
    "shifted distance": (lambda s, b, h, q, k: s + SLOPES[h] * (k - q + 1).abs(), ("function",)),
    "twice the distance": (lambda s, b, h, q, k: s + SLOPES[h] * (2 * k - 2 * q).abs(), ("function",)),
    "distance without heads": (lambda s, b, h, q, k: s + (q - k), ("function",)),
    "capped last": (lambda s, b, h, q, k: 20 * torch.tanh((s + KEYS[k, h]) / 20), ("function",)),
    "other cap": (lambda s, b, h, q, k: 20 * torch.tanh(s / 10), ("function",)),
    "temperature of keys": (lambda s, b, h, q, k: s / KEYS[k, h], ("function",)),
    "twice": (lambda s, b, h, q, k: s + PAIRS[h, q, k] + ROWS[h, q], ("function",)),
    "nothing": (lambda s, b, h, q, k: s, ("function",)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODS)
def test_it_is_recognised_and_does_the_same(name):
    score_mod, kinds = MODS[name]
    found = from_score_mod(score_mod, 20)
    assert found.kinds == kinds
    q, k, v = (torch.randn(1, 2, 20, 8, generator=generator) for _ in range(3))
    expected = attention(q, k, v, scores=scores.function(score_mod), return_lse=True)
    for one, other in zip(attention(q, k, v, scores=found, return_lse=True), expected):
        torch.testing.assert_close(one, other)


def test_distances_for_other_lengths_are_aligned_at_the_end():
    assert from_score_mod(MODS["alibi"][0], 20, 30).kinds == ("function",)
    assert from_score_mod(lambda s, b, h, q, k: s + SLOPES[h] * (q + 10 - k).abs(), 20, 30).kinds == ("distance",)


@pytest.mark.parametrize("name", ["offsets", "buckets", "buckets of pairs"])
def test_places_outside_a_table_stay_a_function(name):
    for length, kinds in ((10, ("relative",)), (20, ("relative",)), (21, ("function",))):
        assert from_score_mod(MODS[name][0], length).kinds == kinds


@pytest.mark.parametrize(("far", "kinds"), [(2.0**24 - 50, ("relative",)), (2.0**24, ("function",))])
def test_positions_that_fp32_cannot_hold_are_no_distance(far, kinds):
    found = from_score_mod(lambda s, b, h, q, k: s + TABLE[h, ((q.float() + far) - (k.float() + far)).int()], 20)
    assert found.kinds == kinds


def test_a_number_that_may_change_is_read_at_every_call():
    start = torch.tensor(0)
    assert from_score_mod(lambda s, b, h, q, k: s + TABLE[h, q - k + start], 10).kinds == ("function",)


@pytest.mark.parametrize("lengths", [(10, 10), (20, 10), (15, 15)])
def test_a_table_is_for_the_lengths_that_were_given(lengths):
    found = from_score_mod(lambda s, b, h, q, k: s + TABLE[h, q - k], 10, 20)
    q, k, v = (torch.randn(1, 2, n, 8) for n in (lengths[0], lengths[1], lengths[1]))
    with pytest.raises(ValueError, match="with the lengths that it got, 10 queries and 20 keys; got others"):
        attention(q, k, v, scores=found)


def test_a_recognised_table_can_be_compiled():
    table = TABLE.clone().requires_grad_()
    q, k, v = (torch.randn(1, 2, n, 8, generator=generator) for n in (10, 20, 20))
    found = from_score_mod(lambda s, b, h, q, k: s - table[h, q - k + 19], 10, 20)
    compiled = torch.compile(lambda q: attention(q, k, v, scores=found), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), attention(q, k, v, scores=found))


def test_captured_tensors_may_be_learned():
    pairs = torch.zeros(2, 20, 20, requires_grad=True)
    q, k, v = (torch.randn(1, 2, 20, 8, generator=generator) for _ in range(3))
    attention(q, k, v, scores=from_score_mod(lambda s, b, h, q, k: s + pairs[h, q, k], 20)).sum().backward()
    assert pairs.grad is not None and (pairs.grad != 0).any()
    found = from_score_mod(lambda s, b, h, q, k: s * pairs[h, q, k], 20)
    assert found.kinds == ("function",)
    own = scores.function(lambda s, b, h, q, k, x: s * x[h, q, k], pairs)
    gradients = [torch.autograd.grad(attention(q, k, v, scores=x).square().sum(), pairs)[0] for x in (found, own)]
    assert (gradients[0] != 0).any() and torch.equal(*gradients)


def drawn_table(draw, q_len, k_len, random):
    shift, most, far = draw(st.integers(-5, 5)), draw(st.integers(1, 6)), q_len + k_len - 1
    differences = (
        lambda q, k: q - k, lambda q, k: k - q, lambda q, k: (q + shift) - (shift + k),
        lambda q, k: -(k - q - shift) - shift,
    )  # fmt: skip
    d = draw(st.sampled_from(differences))
    integers = torch.randint(most, (2 * far + 1,), generator=random)
    pairs = integers[torch.arange(q_len)[:, None] - torch.arange(k_len) + far]
    ways = (
        (2 * far + 1, lambda q, k: d(q, k) + far),
        (2 * far + 1, d),
        (2 * most + 1, lambda q, k: d(q, k).clamp(-most, most) + most),
        (most + 1, lambda q, k: d(q, k).abs().clamp(max=most)),
        (most + 1, lambda q, k: torch.where(d(q, k) > 0, d(q, k), 0).clamp(max=most)),
        (most, lambda q, k: integers[d(q, k) + far]),
        (most, lambda q, k: pairs[q, k]),
        (most, lambda q, k: d(q, k) % most),
        (2 * far, lambda q, k: torch.log1p(d(q, k).abs().float()).to(torch.int64)),
    )
    size, bucket = draw(st.sampled_from(ways))
    if draw(st.booleans()):
        return (2, size), lambda x, b, h, q, k: x[h, bucket(q, k)]
    return (size, 2), lambda x, b, h, q, k: x[bucket(q, k), h]


def drawn_addend(draw, kind, q_len, k_len, random):
    if kind == "relative":
        return drawn_table(draw, q_len, k_len, random)
    shift = k_len - q_len
    ways = {
        "distance": (
            ((2,), lambda x, b, h, q, k: -x[h] * (q + shift - k).abs()),
            ((2,), lambda x, b, h, q, k: 0.5 * x[h] * (k - q - shift).abs().to(x.dtype).log1p()),
        ),
        "key_bias": (((3, k_len), lambda x, b, h, q, k: x[b, k]), ((k_len,), lambda x, b, h, q, k: x[k])),
        "bias": (
            ((k_len, 2, q_len), lambda x, b, h, q, k: x[k, h, q]), ((q_len, 3), lambda x, b, h, q, k: x[q, b]),
        ),
    }  # fmt: skip
    return draw(st.sampled_from(ways[kind]))


@given(data=st.data(), q_len=st.integers(1, 24), k_len=st.integers(1, 24), seed=st.integers(0, 999))
def test_what_is_recognised_has_the_values_and_gradients_of_the_function(data, q_len, k_len, seed):
    random = torch.Generator().manual_seed(seed)
    base = data.draw(st.sets(st.sampled_from(["temperature", "softcap"])))
    kinds = data.draw(st.lists(st.sampled_from(["relative", "distance", "key_bias", "bias"]), min_size=1, unique=True))
    addends = [drawn_addend(data.draw, kind, q_len, k_len, random) for kind in kinds]
    signs = [data.draw(st.booleans()) for _ in kinds]
    double = {"generator": random, "dtype": torch.float64}
    learned = [torch.randn(shape, **double).requires_grad_() for shape, _ in addends]
    if "temperature" in base:
        learned.append((torch.rand(2, **double) + 0.5).requires_grad_())

    def score_mod(s, b, h, q, k, *tensors):
        s = s / tensors[-1][h] if "temperature" in base else s
        s = 2 * torch.tanh(s / 2) if "softcap" in base else s
        for sign, x, (_, added) in zip(signs, tensors, addends):
            s = s + added(x, b, h, q, k) if sign else s - added(x, b, h, q, k)
        return s

    found = from_score_mod(lambda *at: score_mod(*at, *learned), q_len, k_len)
    assert set(found.kinds) == {*kinds, *base}
    q, k, v = (torch.randn(3, 2, n, 8, **double).requires_grad_() for n in (q_len, k_len, k_len))
    results = []
    for changes in (found, scores.function(score_mod, *learned)):
        out, lse = attention(q, k, v, scores=changes, return_lse=True, backend="reference")
        results.append([out, lse, *torch.autograd.grad((out.square().sum(), lse.sum()), [q, k, v, *learned])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


MORE = {
    "slopes": ((5,), lambda x: lambda s, b, h, q, k: s - x[h] * (q - k).abs()),
    "log": ((5,), lambda x: lambda s, b, h, q, k: s - x[h] * torch.log1p((q - k).abs())),
    "table": ((5, 41), lambda x: lambda s, b, h, q, k: s + x[h, k - q + 20]),
    "table, heads last": ((41, 5), lambda x: lambda s, b, h, q, k: s + x[k - q + 20, h]),
    "bias of heads": ((5, 20, 20), lambda x: lambda s, b, h, q, k: s + x[h, q, k]),
    "bias": ((3, 5, 20, 20), lambda x: lambda s, b, h, q, k: s + x[b, h, q, k]),
    "bias, another order": ((20, 5, 3), lambda x: lambda s, b, h, q, k: s - x[q, h, b]),
    "bias of batch elements": ((3,), lambda x: lambda s, b, h, q, k: s + x[b]),
    "bias of keys": ((3, 20), lambda x: lambda s, b, h, q, k: s + x[b, k]),
    "temperature": ((5,), lambda x: lambda s, b, h, q, k: s / x[h]),
    "temperature of queries": ((3, 5, 20), lambda x: lambda s, b, h, q, k: s / x[b, h, q]),
}


@pytest.mark.parametrize("name", MORE)
def test_tensors_with_entries_for_more_heads_are_read_as_indices_read_them(name):
    shape, rule = MORE[name]
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 20, 16, dtype=torch.float64) for _ in range(3))
    x = (torch.rand(shape, dtype=torch.float64) + 1).requires_grad_()
    changes = from_score_mod(rule(x), 20)
    assert changes.kinds != ("function",)
    out = attention(q, k, v, scores=changes, backend="reference")
    places = torch.meshgrid(*(torch.arange(n) for n in (2, 2, 20, 20)), indexing="ij")
    want = rule(x)(q @ k.mT / 4, *places).softmax(-1) @ v
    torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)
    wanted = torch.autograd.grad(want.square().sum(), x)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), x), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MORE)
def test_a_result_that_is_kept_follows_its_tensors(name):
    """As in a training loop: each step changes the learned tensor in place."""
    shape, rule = MORE[name]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 20, 16, generator=generator) for _ in range(3))
    x = (torch.rand(shape, generator=generator) + 1).requires_grad_()
    kept = from_score_mod(rule(x), 20)
    for _ in range(3):
        found = [attention(q, k, v, scores=changes) for changes in (kept, from_score_mod(rule(x), 20))]
        gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in found]
        assert torch.equal(*found) and torch.equal(*gradients)
        with torch.no_grad():
            x += torch.rand(shape, generator=generator)


def test_tensors_with_entries_for_fewer_heads_are_refused():
    q = torch.randn(2, 3, 20, 16)
    for x, rule, said in (
        (torch.ones(2), MORE["slopes"][1], "reads at h must have an entry for each query head, 3; got 2"),
        (torch.ones(1), MORE["temperature"][1], "reads at h must have an entry for each query head, 3; got 1"),
        (torch.ones(1, 20), MORE["bias of keys"][1], "reads at b must have an entry for each batch element, 2; got 1"),
    ):
        with pytest.raises(ValueError, match=f"a tensor that score_mod {said}"):
            attention(q, q, q, scores=from_score_mod(rule(x), 20))
