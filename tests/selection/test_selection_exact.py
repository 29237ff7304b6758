from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflash import selection
from sparseflash.decode import attention_to_pages
from sparseflash.selection import attending
from tests.selection import papers
from tests.selection.layers import (
    DIM,
    INDEXED,
    KINDS,
    PAPERS,
    WIDTH,
    chosen_by,
    example_of,
    filled,
    gradients,
    layers,
    sequence,
)  # fmt: skip

SEEDS = st.integers(0, 1000)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(st.data(), SEEDS)
def test_a_layer_is_its_papers_equations(kind, data, seed):
    layer = data.draw(layers(kind))
    n = data.draw(st.integers(1, 60))
    x = sequence(n, seed).requires_grad_()
    error = {"rtol": 1e-9, "atol": 1e-9} if layer.rotary is None else {"rtol": 1e-5, "atol": 1e-5}
    out, live = chosen_by(layer, x)
    want, want_live, want_loss = PAPERS[kind](layer, x[0])
    assert torch.equal(live[0], want_live)
    torch.testing.assert_close(out[0], want, **error)
    loss = getattr(layer, "loss", None)
    if want_loss is not None:
        torch.testing.assert_close(loss, torch.as_tensor(want_loss, dtype=torch.float64), **error)
    pull = sequence(n, seed + 1)
    got = gradients(layer, x, out, loss, pull)
    torch.testing.assert_close(got, gradients(layer, x, want[None], want_loss, pull), **error)


VIDEOS = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6))


@settings(max_examples=10)
@given(
    VIDEOS, st.sampled_from([0, 0, 1, 16, 21]), st.sampled_from([(1, 4, 4), (2, 2, 4)]), st.integers(1, 3),
    st.sampled_from([(2, 1), (2, 2), (1, 1)]), SEEDS,
)  # fmt: skip
def test_a_video_layer_is_its_papers_equations(shape, text, cube, chosen, heads, seed):
    layer = selection.VideoSparseAttention(WIDTH, *heads, head_dim=DIM, cube=cube, chosen=chosen)
    layer = filled(layer, seed)
    x = sequence(text + shape[0] * shape[1] * shape[2], seed).requires_grad_()
    out, pull = layer(x, shape, text=text), sequence(x.shape[1], seed + 1)
    want, _, _ = papers.video(layer, x[0], shape, text)
    torch.testing.assert_close(out[0], want, rtol=1e-7, atol=1e-8)
    got = gradients(layer, x, out, None, pull)
    torch.testing.assert_close(got, gradients(layer, x, want[None], None, pull), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(st.data(), SEEDS)
def test_packed_sequences_are_as_separate_ones(kind, data, seed):
    layer = data.draw(layers(kind))
    lengths = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=4).filter(any))
    x = sequence(sum(lengths), seed).requires_grad_()
    pull = sequence(sum(lengths), seed + 1)
    packed = layer(x, cu_seqlens=[0, *torch.tensor(lengths).cumsum(0).tolist()])
    loss = getattr(layer, "loss", None)
    outs, losses = [], 0.0
    for part in x.split(lengths, 1):
        outs.append(layer(part))
        if loss is not None and part.shape[1]:
            losses = losses + layer.loss * part.shape[1] / sum(lengths)
    separate = torch.cat(outs, 1)
    torch.testing.assert_close(packed, separate, rtol=1e-9, atol=1e-10)
    if loss is None:
        losses = None
    got = gradients(layer, x, packed, loss, pull)
    torch.testing.assert_close(got, gradients(layer, x, separate, losses, pull), rtol=1e-7, atol=1e-8)


@settings(max_examples=10)
@given(st.lists(VIDEOS, min_size=1, max_size=3), st.data(), st.integers(1, 3), SEEDS)
def test_packed_videos_are_as_separate_ones(shapes, data, chosen, seed):
    layer = filled(selection.VideoSparseAttention(WIDTH, 2, 1, head_dim=DIM, cube=(1, 4, 4), chosen=chosen), seed)
    texts = data.draw(st.sampled_from([[0] * len(shapes), [5, 0, 17][: len(shapes)]]))
    counts = [text + t * h * w for text, (t, h, w) in zip(texts, shapes)]
    x = sequence(sum(counts), seed).requires_grad_()
    pull = sequence(sum(counts), seed + 1)
    packed = layer(x, shapes, text=texts)
    parts = zip(x.split(counts, 1), shapes, texts)
    separate = torch.cat([layer(part, shape, text=text) for part, shape, text in parts], 1)
    torch.testing.assert_close(packed, separate, rtol=1e-9, atol=1e-10)
    got = gradients(layer, x, packed, None, pull)
    torch.testing.assert_close(got, gradients(layer, x, separate, None, pull), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(st.data(), SEEDS)
def test_tokens_after_a_cache_are_as_in_one_call(kind, data, seed):
    layer = data.draw(layers(kind)).eval()
    steps = data.draw(st.lists(st.sampled_from([1, 1, 1, 2, 17, 40]), min_size=1, max_size=6))
    x = sequence(sum(steps), seed, batch=2)
    with torch.no_grad():
        want = layer(x)
        cache = layer.new_cache(2, sum(steps) + data.draw(st.integers(0, 60)))
        for each in (cache.k, cache.v, *cache.more.values()):
            each.fill_(torch.nan)  # room is not read
        outs = [layer(part, cache=cache) for part in x.split(steps, 1)]
    torch.testing.assert_close(torch.cat(outs, 1), want, rtol=1e-6, atol=1e-7)
    assert cache.length == sum(steps)


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_of_a_long_generation_is_right(kind):
    layer = example_of(kind).eval()
    x = sequence(100, 3, batch=2)
    with torch.no_grad():
        cache = layer.new_cache(2, 100)
        outs = [layer(x[:, :5], cache=cache), *(layer(x[:, t : t + 1], cache=cache) for t in range(5, 100))]
        torch.testing.assert_close(torch.cat(outs, 1), layer(x), rtol=1e-6, atol=1e-7)
        cache.truncate(61)  # drafts that were not accepted
        again = [layer(x[:, t : t + 1], cache=cache) for t in range(61, 100)]
    torch.testing.assert_close(torch.cat(again, 1), torch.cat(outs[57:], 1), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_after_a_cache_asks_for_its_attention_once(kind):
    """Also where each query head chooses for itself."""
    layer, x = example_of(kind, 8, 2).eval(), sequence(61, 5, batch=3)
    calls = []

    def counted(*given, **how):
        calls.append(given[4].shape)
        return attention_to_pages(*given, **how)

    with torch.no_grad(), mock.patch.object(attending, "attention_to_pages", counted):
        cache = layer.new_cache(3, 61)
        outs = [layer(part, cache=cache) for part in x.split([57, 1, 2, 1], 1)]
    torch.testing.assert_close(torch.cat(outs, 1), layer(x), rtol=1e-6, atol=1e-7)
    lists = (6, 4) if kind == "MixtureOfBlocks" else (3, 2)
    assert [shape[:2] for shape in calls] == [lists] * 2


def test_the_papers_large_blocks_of_moba_are_chosen_and_cached():
    layer = example_of("MixtureOfBlocks", block=512, chosen=2).eval()
    x = sequence(1600, 3)
    with torch.no_grad():
        out, live = chosen_by(layer, x)
        assert torch.equal(live[0].sum(2)[0, [0, 511, 512, 1100, 1599]], torch.tensor([1, 512, 513, 589, 576]))
        cache = layer.new_cache(1, 1600)
        outs = [layer(part, cache=cache) for part in x.split([1023, 1, 1, 574, 1], 1)]
    torch.testing.assert_close(torch.cat(outs, 1), out, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_the_future_changes_nothing_and_a_call_repeats_to_the_bit(kind):
    layer = example_of(kind).float()
    x = sequence(100, 1, batch=2).float().requires_grad_()
    pull = sequence(100, 2, batch=2).float()

    def run(x):
        torch.manual_seed(0)
        out = layer(x)
        return out, gradients(layer, x, out, getattr(layer, "loss", None), pull)

    (out, grads), (again, grads_again) = run(x), run(x)
    assert torch.equal(out, again) and all(torch.equal(grads[name], grads_again[name]) for name in grads)
    later = x.detach().clone()
    later[:, 77:] += 1.0
    torch.testing.assert_close(layer(later)[:, :77], out[:, :77], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_all_keys_chosen_are_dense_attention(kind):
    if kind == "NativeSparseAttention":
        layer = example_of(kind, chosen=7)
        torch.nn.init.zeros_(layer.gate.weight)
        layer.gate.bias.data = torch.tensor([-100.0] * 4 + [100.0] * 4 + [-100.0] * 4).double()
    else:
        layer = example_of(kind, chosen=100)
    x = sequence(100, 1)
    heads = layer.qkv(x).unflatten(2, (-1, DIM)).transpose(1, 2)
    q, k, v = heads.split([4, 2 * layer.pairs, 2 * layer.pairs], 1)
    k, v = (y[:, 2 * (layer.pairs > 1) :][:, :2] for y in (k, v))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(layer(x), layer.out(want.transpose(1, 2).flatten(2)), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("kind", INDEXED)
def test_the_indexer_learns_from_its_own_loss_alone(kind):
    layer, x = example_of(kind), sequence(100, 1).requires_grad_()
    names = {name for name, _ in layer.named_parameters()}
    indexer = {name for name in names if name.startswith(("index_", "weights"))}
    of_out = gradients(layer, x, layer(x), None, sequence(100, 2))
    of_loss = gradients(layer, x, layer(x).detach(), layer.loss, sequence(100, 2))
    assert {name for name in of_out if of_out[name].any()} == (names - indexer) | {"x"}
    assert {name for name in of_loss if of_loss[name].any()} == names & indexer
    layer.loss = None
    layer.eval()(x)
    assert layer.loss is None


@pytest.mark.parametrize("kind", INDEXED)
def test_a_drawn_part_of_the_queries_may_teach_the_indexer(kind):
    layer, x = example_of(kind, taught=30), sequence(100, 1)
    drawn = []
    with mock.patch.object(torch, "randperm", lambda n, **_: drawn.append(torch.arange(n).flip(0)) or drawn[-1]):
        layer(x)
    some = layer.loss.detach()
    each = []
    for t in range(70, 100):
        with mock.patch.object(torch, "randperm", lambda n, t=t, **_: torch.tensor([t])):
            layer.taught = 1
            layer(x)
        each.append(layer.loss.detach())
    torch.testing.assert_close(some, torch.stack(each).mean())
    layer.taught = 200
    layer(x)
    whole = layer.loss.detach()
    layer.taught = None
    layer(x)
    assert torch.equal(layer.loss, whole) and not torch.isclose(whole, some)


@pytest.mark.parametrize("kind", INDEXED)
def test_the_loss_is_the_same_in_chunks(kind, monkeypatch):
    layer, x = example_of(kind), sequence(100, 1).requires_grad_()
    out = layer(x)
    want = gradients(layer, x, out, layer.loss, sequence(100, 2))
    monkeypatch.setattr("sparseflash.selection.choice.AT_ONCE", 5000)
    out = layer(x)
    torch.testing.assert_close(gradients(layer, x, out, layer.loss, sequence(100, 2)), want, rtol=1e-9, atol=1e-10)
