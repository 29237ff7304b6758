from functools import partial

import pytest
import torch

from sparseflash import masks, scores

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
from torch.nn.attention import flex_attention as flex
from torchtitan.models.common import attention as theirs
from torchtitan.models.llama3 import llama3_configs

from sparseflash.interop.torchtitan import SparseAttention, SparseAttentionConverter

POSITIONS = torch.stack([torch.cat([torch.arange(n), torch.arange(60 - n)]) for n in (37, 60)])
TOKENS = torch.randint(0, 2048, (2, 60), generator=torch.Generator().manual_seed(0))
LOCAL = partial(masks.local, window=9, causal=True)


def built(inner_attention=None, **options):
    config = llama3_configs["debugmodel"]("varlen")
    config.layers = config.layers[:2]
    if inner_attention is None:
        config = SparseAttentionConverter.Config(**options).build().convert(config)
    else:
        for layer in config.layers:
            layer.attention.inner_attention = inner_attention
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    return model


def test_a_causal_model_is_that_of_pytorchs_attention():
    ours, plain = built(), built(theirs.ScaledDotProductAttention.Config())
    assert isinstance(ours.layers["0"].attention.inner_attention, SparseAttention)
    whole = torch.arange(60).expand(2, -1)
    out = ours(TOKENS, whole, ours.get_attention_masks(whole))
    want = plain(TOKENS, whole, None)
    torch.testing.assert_close(out, want)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        a, b = torch.autograd.grad(out.square().mean(), one, retain_graph=True)[0], None
        (b,) = torch.autograd.grad(want.square().mean(), other, retain_graph=True)
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("window", [None, 9])
def test_packed_documents_are_those_of_flexattention(window, monkeypatch):
    """FlexAttention without gradients, which it refuses on a CPU."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(theirs.FlexAttention, "_compiled_flex_attn", staticmethod(flex.flex_attention))
    pattern, mods = masks.causal, [theirs.get_causal_mask_mod(), theirs.get_document_mask_mod(POSITIONS)]
    if window is not None:
        pattern, mods = LOCAL, [*mods, theirs.get_sliding_window_mask_mod(window)]
    with torch.no_grad():
        plain, ours = built(theirs.FlexAttention.Config()), built(patterns=pattern)
        mask = flex.create_block_mask(flex.and_masks(*mods), 2, None, 60, 60, device="cpu")
        want = plain(TOKENS, POSITIONS, mask)
        torch.testing.assert_close(ours(TOKENS, POSITIONS, ours.get_attention_masks(POSITIONS)), want)


def test_a_model_is_trained_with_a_pattern_for_each_layer():
    model = built(patterns=[LOCAL, masks.causal], scores=scores.softcap(30.0))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for _ in range(4):
        out = model(TOKENS, POSITIONS, model.get_attention_masks(POSITIONS))
        loss = torch.nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.5


def test_the_lse_goes_to_the_transform():
    attention = SparseAttention.Config().build()
    metadata = theirs.create_varlen_metadata_for_document(POSITIONS)
    q, k, v = torch.randn(2, 60, 4, 16), torch.randn(2, 60, 2, 16), torch.randn(2, 60, 2, 8)
    out = attention(q, k, v, attention_masks=metadata, enable_gqa=True)
    weighted = attention(q, k, v, attention_masks=metadata, out_transform=lambda out, lse: out * lse[..., None])
    assert out.shape == (2, 60, 4, 8)
    at = slice(37, 60)
    rows = q[0, at].transpose(0, 1) @ k[0, at].transpose(0, 1).repeat_interleave(2, 0).mT / 4
    lse = rows.masked_fill(torch.ones(23, 23, dtype=torch.bool).triu(1), -torch.inf).logsumexp(-1)
    torch.testing.assert_close(weighted[0, at], out[0, at] * lse.mT[..., None])


def test_what_cannot_be_taken_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match=r"window_size must be \(-1, 0\): pass pattern=functools.partial\(masks.local"):
        SparseAttention.Config(window_size=(8, 0)).build()
    with pytest.raises(ValueError, match=r"attention_masks must be torchtitan's VarlenMetadata; got None\."):
        SparseAttention.Config().build()(*torch.randn(3, 1, 8, 2, 16), attention_masks=None)
    with pytest.raises(ValueError, match=r"patterns must be one for all layers or one for each of the 2; got 3\."):
        built(patterns=[masks.causal] * 3)
