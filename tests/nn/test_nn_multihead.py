import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import interop, masks
from sparseflash.nn import MultiheadAttention
from tests.drawn.counts import examples_times


def pair(mask=None, **arguments):
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(16, 2, dtype=torch.float64, **arguments).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return theirs, MultiheadAttention.from_multihead(theirs, mask)


@given(
    batch_first=st.booleans(),
    bias=st.booleans(),
    narrow=st.booleans(),
    has_batch=st.booleans(),
    padding=st.sampled_from([None, "bool", "float"]),
    attn_mask=st.sampled_from([None, "bool", "float", "bool each", "float each"]),
    seed=st.integers(0, 99),
)
@examples_times(2)
def test_it_computes_what_pytorchs_does(batch_first, bias, narrow, has_batch, padding, attn_mask, seed):
    theirs, ours = pair(batch_first=batch_first, bias=bias, **({"kdim": 8, "vdim": 4} if narrow else {}))
    batch, q_len, k_len = 3, 20, 30
    generator = torch.Generator().manual_seed(seed)

    def drawn(length, features):
        shape = (batch, length, features) if batch_first else (length, batch, features)
        shape = shape if has_batch else (length, features)
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    inputs = drawn(q_len, 16), drawn(k_len, 8 if narrow else 16), drawn(k_len, 4 if narrow else 16)
    batch = batch if has_batch else 1
    named = {}
    if attn_mask is not None:
        shape = (batch * 2, q_len, k_len) if "each" in attn_mask else (q_len, k_len)
        drawn_mask = torch.randn(shape, generator=generator, dtype=torch.float64)
        dead = drawn_mask > 0.5
        dead[..., 0] = False  # PyTorch's result depends on its kernel otherwise
        named["attn_mask"] = dead if "bool" in attn_mask else drawn_mask.masked_fill(dead, -torch.inf)
    if padding is not None:
        dead = torch.arange(k_len) >= torch.randint(1, k_len + 1, (batch, 1), generator=generator)
        dead = dead if has_batch else dead[0]
        as_float = padding == "float" or (attn_mask is not None and "float" in attn_mask)
        if attn_mask is not None and "bool" in attn_mask:
            as_float = False
        named["key_padding_mask"] = torch.zeros(dead.shape).double().masked_fill(dead, -torch.inf) if as_float else dead
    out, weights = ours(*inputs, **named)
    expected, _ = theirs(*inputs, need_weights=False, **named)
    assert weights is None
    torch.testing.assert_close(out, expected)
    wanted = torch.autograd.grad(expected.square().sum(), [*inputs, *theirs.parameters()])
    for a, b in zip(torch.autograd.grad(out.square().sum(), [*inputs, *ours.parameters()]), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_its_state_dict_is_pytorchs():
    theirs, ours = pair(batch_first=True)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    fresh = MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64)
    fresh.load_state_dict(theirs.state_dict())
    torch.nn.MultiheadAttention(16, 2, dtype=torch.float64).load_state_dict(ours.state_dict())
    x = torch.randn(1, 10, 16).double()
    assert fresh(x, x, x)[0].equal(ours(x, x, x)[0]) and copy.deepcopy(ours)(x, x, x)[0].equal(ours(x, x, x)[0])


def test_a_score_is_live_if_every_mask_has_it_live():
    mask = masks.local(20, window=6, block=16)
    theirs, ours = pair(mask, batch_first=True)
    x = torch.randn(2, 20, 16).double()
    live = mask.to_dense()[0, 0]
    torch.testing.assert_close(ours(x, x, x)[0], theirs(x, x, x, attn_mask=~live)[0])
    causal = torch.ones(20, 20, dtype=torch.bool).tril()
    expected = theirs(x, x, x, attn_mask=~(live & causal))[0]
    torch.testing.assert_close(ours(x, x, x, attn_mask=~causal)[0], expected)
    torch.testing.assert_close(ours(x, x, x, attn_mask=masks.causal(20, block=16))[0], expected)
    torch.testing.assert_close(ours(x, x, x, is_causal=True)[0], expected)
    torch.testing.assert_close(ours(x, x, x, attn_mask=~causal, is_causal=True)[0], expected)
    of_pytorch = pair(batch_first=True)[1](x, x, x, attn_mask=~interop.to_sdpa(mask)[0, 0])[0]
    torch.testing.assert_close(of_pytorch, ours(x, x, x)[0])


@pytest.mark.parametrize("training", [True, False])
def test_transformer_layers_of_pytorch_take_it(training):
    """Their fast path of eval mode would compute dense attention."""
    mask = masks.local(30, window=6, block=16)
    torch.manual_seed(0)
    encoder = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).train(training)
    decoder = torch.nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True).train(training)
    x, dead = torch.randn(2, 30, 16), ~mask.to_dense()[0, 0]
    padding = torch.arange(30) >= torch.tensor([[30], [28]])
    with torch.no_grad():
        expected = encoder(x, src_mask=dead, src_key_padding_mask=padding)
        wanted = decoder(x, x, tgt_mask=dead, memory_key_padding_mask=padding)
        encoder.self_attn = MultiheadAttention.from_multihead(encoder.self_attn, mask)
        decoder.self_attn = MultiheadAttention.from_multihead(decoder.self_attn, mask)
        decoder.multihead_attn = MultiheadAttention.from_multihead(decoder.multihead_attn)
        torch.testing.assert_close(encoder(x, src_key_padding_mask=padding), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(decoder(x, x, memory_key_padding_mask=padding), wanted, atol=1e-5, rtol=1e-5)
        stack = torch.nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False).train(training)
        whole = stack(x, src_key_padding_mask=padding)
        torch.testing.assert_close(
            whole, encoder(encoder(x, src_key_padding_mask=padding), src_key_padding_mask=padding)
        )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_layers_of_a_whole_encoder_are_replaced_without_nested_tensors():
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 2).eval()
    x, padding = torch.randn(2, 20, 16), torch.arange(20) >= torch.tensor([[20], [7]])
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
        for layer in encoder.layers:
            layer.self_attn = MultiheadAttention.from_multihead(layer.self_attn)
        with pytest.raises(TypeError, match=r"got a nested one.* unless you set its use_nested_tensor = False"):
            encoder(x, src_key_padding_mask=padding)
        encoder.use_nested_tensor = False
        found = encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(found[~padding], expected[~padding], atol=1e-5, rtol=1e-5)


def test_it_compiles_whole_without_masks_that_are_tensors():
    ours = pair(masks.causal, batch_first=True)[1]
    x = torch.randn(1, 20, 16).double()
    whole = torch.compile(lambda x: ours(x, x, x, is_causal=True)[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(x), ours(x, x, x)[0])
    padding = torch.arange(20)[None] >= 7
    padded = torch.compile(ours, backend="aot_eager")(x, x, x, key_padding_mask=padding)[0]
    torch.testing.assert_close(padded, ours(x, x, x, key_padding_mask=padding)[0])


def test_what_it_does_not_have_is_refused_with_advice():
    for arguments, words in (
        ({"add_bias_kv": True}, "add_bias_kv and add_zero_attn must be False"),
        ({"add_zero_attn": True}, "add_bias_kv and add_zero_attn must be False"),
        ({"embed_dim": 15}, "embed_dim must be a multiple of num_heads; got 15 and 2"),
        ({"num_heads": 0}, "num_heads must be at least 1; got 0"),
        ({"kdim": 0}, "kdim must be at least 1; got 0"),
        ({"vdim": -1}, "vdim must be at least 1; got -1"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1; got 1.0"),
    ):
        with pytest.raises(ValueError, match=words):
            MultiheadAttention(**{"embed_dim": 16, "num_heads": 2} | arguments)
    layer, x = MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 10, 16)
    nested = torch.nested.nested_tensor([torch.randn(5, 16)], layout=torch.jagged)
    for inputs, named, kind, words in (
        ((x, x, x), {"need_weights": True}, ValueError, "need_weights must be False: attention weights are never all"),
        ((x, x[0], x), {}, ValueError, "must all have 3 dimensions, or all 2 without a batch"),
        ((x, x, x[..., :3]), {}, ValueError, "value must have 16 features; got 3"),
        ((None, x, x), {}, TypeError, "query must be a tensor; got NoneType"),
        ((nested, x, x), {}, TypeError, "query must be a plain tensor; got a nested one"),
        ((x, x, x), {"attn_mask": torch.ones(3, 10, 10).bool()}, ValueError, r"\[10, 10\] or \[4, 10, 10\]; got \[3"),
        ((x, x, x), {"attn_mask": [1]}, TypeError, "attn_mask must be a BlockMask, a bool .* got list"),
        (
            (x, x, x),
            {"key_padding_mask": torch.ones(2, 9).bool()},
            ValueError,
            r"must have shape \[2, 10\]; got \[2, 9",
        ),
        ((x, x, x), {"key_padding_mask": [1]}, TypeError, "key_padding_mask must be a bool .* got list"),
        ((x, x, x), {"is_causal": "no"}, TypeError, "is_causal must be True or False; got 'no'"),
        ((x, x, x), {"need_weights": "no"}, TypeError, "need_weights must be True or False; got 'no'"),
    ):
        with pytest.raises(kind, match=words):
            layer(*inputs, **named)
