import inspect
import re
import sys
import typing

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

from sparseflash import attention, interop, masks
from sparseflash.remedies import REMEDIES


def inputs(q_len=20, k_len=20, heads=2):
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, q_len), (2, k_len), (2, k_len))
    return [torch.randn(2, *shape, 16, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("is_causal", "masks.causal(q.shape[2], k.shape[2])"),
        ("attn_mask", "interop.from_sdpa(attn_mask)"),
        ("block_mask", "interop.from_flex(block_mask)"),
        ("enable_gqa", "query heads are grouped whenever k and v have fewer heads"),
        ("score_mod", "pass scores=, such as scores.alibi(slopes)"),
        ("softmax_scale", "it is called scale"),
        ("window_size", "masks.local(q.shape[2], k.shape[2], left=left, right=right)"),
        *((name, REMEDIES[name]) for name in REMEDIES),
    ],
)
def test_a_keyword_of_another_attention_is_refused_with_the_remedy(name, remedy):
    with pytest.raises(TypeError, match=f"^{name} must not be given to attention: .*{re.escape(remedy)}"):
        attention(*inputs(), **{name: True})


def test_other_keywords_are_unexpected_as_they_are_to_any_function():
    with pytest.raises(TypeError, match=r"^attention\(\) got an unexpected keyword argument 'nope'$"):
        attention(*inputs(), nope=1)


def test_the_signature_has_no_room_for_any_keyword():
    signatures = [inspect.signature(attention)]
    if sys.version_info >= (3, 11):
        signatures += map(inspect.signature, typing.get_overloads(attention))
        assert len(signatures) == 3
    for signature in signatures:
        assert all(p.kind is not p.VAR_KEYWORD for p in signature.parameters.values())
        assert list(signature.parameters)[:5] == ["q", "k", "v", "mask", "scale"]


def test_the_advice_for_masks_of_pytorch_is_right():
    q, k, v = inputs()
    want = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attention(q, k, v, masks.causal(q.shape[2], k.shape[2])), want)
    attn_mask = torch.rand(2, 1, 20, 20, generator=torch.Generator().manual_seed(1)) < 0.5
    attn_mask[..., 0] = True
    want = scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
    torch.testing.assert_close(attention(q, k, v, interop.from_sdpa(attn_mask)), want)
    block_mask = create_block_mask(lambda b, h, q, k: q - k < 3, 1, 1, 20, 20, device="cpu", BLOCK_SIZE=32)
    got = attention(q, k, v, interop.from_flex(block_mask))
    rule = torch.arange(20)[:, None] - torch.arange(20) < 3
    torch.testing.assert_close(got, scaled_dot_product_attention(q, k, v, attn_mask=rule))


def test_the_advice_for_other_lengths_is_right():
    q, k, v = inputs(q_len=7)
    want = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attention(q, k, v, masks.causal(7, 20, offset=0)), want)
    assert not torch.allclose(attention(q, k, v, masks.causal(7, 20)), want)


def test_the_advice_for_heads_and_padding_is_right():
    q, k, v = inputs(heads=4)
    torch.testing.assert_close(attention(q, k, v), scaled_dot_product_attention(q, k, v, enable_gqa=True))
    padding = torch.arange(20) >= torch.tensor([[13], [20]])
    want = scaled_dot_product_attention(q, k, v, attn_mask=~padding[:, None, None, :], enable_gqa=True)
    got = attention(q, k, v, interop.from_sdpa(~padding[:, None, None, :], q_len=q.shape[2]))
    torch.testing.assert_close(got, want)
    within = attention(q, k, v, masks.dense(20).with_lengths([13, 20]))
    torch.testing.assert_close(within[0, :, :13], want[0, :, :13])


def test_the_advice_for_attention_weights_is_right():
    q, k, v = inputs()
    mask = masks.causal(20)
    out, lse = attention(q, k, v, mask, return_lse=True)
    weights = torch.exp(q @ k.mT / 4 - lse[..., None]) * mask.to_dense()
    torch.testing.assert_close(weights @ v, out)


def test_what_torch_compile_says_of_it_has_the_remedy():
    compiled = torch.compile(lambda q: attention(q, q, q, is_causal=True), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="is_causal must not be given to attention: pass a mask"):
        compiled(inputs()[0])
