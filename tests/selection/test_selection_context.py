import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.processes.pool import Processes
from tests.selection import in_processes
from tests.selection.layers import KINDS, example_of, gradients, latent_layer, layers, sequence


@pytest.fixture(scope="module")
def pool():
    with Processes(3) as processes:
        yield processes


def check(pool, ranks, layer, x, pull, **error):
    x = x.requires_grad_()
    out = layer(x)
    loss = getattr(layer, "loss", None)
    want = gradients(layer, x, out, loss, pull)
    outs, losses, found = zip(*pool.run(ranks, in_processes.part, layer, x.detach(), pull), strict=True)
    torch.testing.assert_close(torch.cat(outs, 1), out.cpu(), **error)
    if loss is not None:
        torch.testing.assert_close(sum(losses), loss.cpu(), **error)
    for name, value in want.items():
        parts = [each[name] for each in found]
        torch.testing.assert_close(torch.cat(parts, 1) if name == "x" else sum(parts), value.cpu(), **error)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)
@given(st.data(), st.integers(2, 3), st.integers(0, 1000))
def test_a_sequence_on_several_ranks_is_as_on_one(pool, kind, data, ranks, seed):
    layer = data.draw(layers(kind))
    n = data.draw(st.integers(ranks, 90))
    error = 1e-8 if layer.rotary is None else 1e-4
    check(pool, ranks, layer, sequence(n, seed, batch=2), sequence(n, seed + 1, batch=2), rtol=10 * error, atol=error)


def test_a_latent_key_travels_as_one(pool):
    layer = latent_layer(teach="chosen")
    check(pool, 2, layer, sequence(61, 0), sequence(61, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_on_several_ranks_repeats_to_the_bit(pool, kind):
    layer, x, pull = (y.float() for y in (example_of(kind), sequence(100, 1), sequence(100, 2)))
    assert all(pool.run(3, in_processes.repeats, layer, x, pull))


def test_second_derivatives_are_refused(pool):
    found = pool.run(2, in_processes.second_derivative, sequence(40, 1))
    text = "gradients of gradients are not implemented with a context; one rank with backend='reference' has them."
    assert found == [text] * 2


def test_what_does_not_fit_a_context_is_refused(pool):
    layer, x = example_of("MixtureOfBlocks"), sequence(40, 1)
    want = "x must have the 20 tokens of rank 0 of 2, as context.part(x) takes them; got 39."
    assert pool.run(2, in_processes.refused, layer, x, {})[0] == want
    found = pool.run(2, in_processes.refused, layer, x, {"cu_seqlens": [0, 40]})
    assert found == ["context must not be given with cu_seqlens; got both."] * 2
    assert pool.run(2, in_processes.too_few) == ["tokens must be at least one for each of 2 ranks; got 1."] * 2
    with pytest.raises(TypeError, match=r"context must be selection\.Context; got int\."):
        layer(x, context=2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_on_two_gpus_is_as_on_one(kind):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs; there is {torch.cuda.device_count()}")
    with Processes(2, timeout=300, backend="nccl") as pool:
        layer, x, pull = (y.float() for y in (example_of(kind), sequence(300, 1), sequence(300, 2)))
        assert all(pool.run(2, in_processes.repeats, layer, x, pull))
        check(pool, 2, layer.cuda(), x.cuda(), pull.cuda(), rtol=2e-3, atol=2e-3)
