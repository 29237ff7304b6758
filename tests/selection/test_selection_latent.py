"""`TokenSelection` with multi-head latent attention, against the equations without the absorption."""

import pytest
import torch

from sparseflash import nn, selection
from tests.selection import papers
from tests.selection.layers import WIDTH, chosen_by, gradients, latent_layer, sequence


@pytest.mark.parametrize("teach", ["visible", "chosen"])
@pytest.mark.parametrize("options", [{}, {"rotary": False, "scale": 0.7}, {"chosen": 1}, {"chosen": 50}])
def test_absorbed_heads_are_the_equations(options, teach):
    layer = latent_layer(teach=teach, **options)
    x, pull = sequence(30, 1).requires_grad_(), sequence(30, 2)
    error = {"rtol": 1e-5, "atol": 1e-5} if layer.rotary else {"rtol": 1e-9, "atol": 1e-9}
    out, live = chosen_by(layer, x)
    want, want_live, want_loss = papers.tokens(layer, x[0])
    assert torch.equal(live[0], want_live)
    torch.testing.assert_close(out[0], want, **error)
    torch.testing.assert_close(layer.loss, want_loss, **error)
    got = gradients(layer, x, out, layer.loss, pull)
    torch.testing.assert_close(got, gradients(layer, x, want[None], want_loss, pull), **error)


def test_the_cache_holds_one_latent_key_a_token():
    layer, x = latent_layer().eval(), sequence(60, 3, batch=2)
    with torch.no_grad():
        cache = layer.new_cache(2, 70)
        assert cache.k.shape == (2, 1, 70, 18) and cache.v.numel() == 0
        outs = [layer(part, cache=cache) for part in x.split([33, 1, 1, 20, 1, 4], 1)]
        torch.testing.assert_close(torch.cat(outs, 1), layer(x), rtol=1e-6, atol=1e-7)


def test_packed_documents_are_as_separate_ones():
    layer, x = latent_layer(), sequence(60, 4)
    packed = layer(x, cu_seqlens=[0, 1, 23, 60])
    separate = torch.cat([layer(part) for part in x.split([1, 22, 37], 1)], 1)
    torch.testing.assert_close(packed, separate, rtol=1e-9, atol=1e-10)


def test_what_latent_attention_does_not_have_is_refused():
    sizes = selection.Latent(12, 6, 5, 7, 10)
    for given in ({"kv_heads": 2}, {"head_dim": 16}, {"bias": True}, {"qk_norm": True}):
        with pytest.raises(ValueError, match="kv_heads, head_dim, bias and qk_norm must not be given with latent: all"):
            selection.TokenSelection(WIDTH, 4, latent=sizes, **given)
    with pytest.raises(TypeError, match=r"latent must be selection\.Latent or None; got tuple\."):
        selection.TokenSelection(WIDTH, 4, latent=(12, 6, 8, 8, 16))
    with pytest.raises(ValueError, match="rotary must be for heads of 6 features; it is for 18"):
        selection.TokenSelection(WIDTH, 4, latent=sizes, rotary=nn.Rotary(18))
    with pytest.raises(ValueError, match=r"latent\.rank must be at least 1; got 0"):
        selection.TokenSelection(WIDTH, 4, latent=sizes._replace(rank=0))


@pytest.mark.gpu
def test_a_gpu_computes_latent_attention_as_the_cpu_does():
    layer, x, pull = latent_layer(teach="chosen").float(), sequence(300, 1).float(), sequence(300, 2).float()
    x.requires_grad_()
    out = layer(x)
    want = gradients(layer, x, out, layer.loss, pull)
    layer, there = layer.cuda(), x.detach().cuda().requires_grad_()
    got = layer(there)
    torch.testing.assert_close(got.cpu(), out, rtol=2e-3, atol=2e-3)
    found = gradients(layer, there, got, layer.loss, pull.cuda())
    for name, value in found.items():
        torch.testing.assert_close(value.cpu(), want[name], rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
def test_a_gpu_trains_latent_attention_at_the_papers_sizes():
    layer = selection.TokenSelection(
        512, 128, latent=selection.Latent(), teach="chosen", chosen=512, device="cuda", dtype=torch.bfloat16
    )
    x = torch.randn(1, 2048, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def run():
        out = layer(x)
        return gradients(layer, x, out, layer.loss, x.detach())

    found, again = run(), run()
    assert all(value.isfinite().all() and torch.equal(value, again[name]) for name, value in found.items())


def test_kernels_compute_latent_attention_and_the_loss_over_chosen_tokens():
    found = {}
    for backend in ("reference", "triton"):  # interpreted
        layer, x = latent_layer(teach="chosen", backend=backend).float(), sequence(20, 1).float().requires_grad_()
        out = layer(x)
        found[backend] = out, layer.loss, gradients(layer, x, out, layer.loss, sequence(20, 2).float())
    torch.testing.assert_close(found["triton"], found["reference"], rtol=1e-4, atol=1e-5)
