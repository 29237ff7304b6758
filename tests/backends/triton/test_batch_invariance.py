import pytest
import torch

from sparseflash import BlockMask, attention, masks


def results(q, k, v, mask):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = attention(q, k, v, mask, return_lse=True, backend="triton")
    return (out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out) / 8))


def same_bits(mask, dim, dtype, *, batch, heads, tokens, device):
    generator = torch.Generator().manual_seed(dim)
    shape = (batch, heads, tokens, dim)
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3))
    together = results(q, k, v, mask)
    for part in ((slice(-1, None),), (slice(-1, None), slice(-1, None)), (slice(None), slice(0, 2))):
        alone = results(*(x[part] for x in (q, k, v)), mask)
        for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), alone, together, strict=True):
            assert torch.equal(got, want[part]), f"{name} of {part}"


@pytest.mark.parametrize("kind", ["causal", "global row", "dense"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(kind):
    layout = torch.eye(5, dtype=torch.bool)
    layout[1] = layout[:, 2] = True
    mask = {
        "causal": masks.causal(70, block=16),
        "global row": BlockMask.from_layout(layout, block=16, q_len=70, k_len=70),
        "dense": None,
    }[kind]
    same_bits(mask, 16, torch.float16, batch=3, heads=3, tokens=70, device="cpu")


def global_rows_and_columns(tokens):
    layout = torch.eye(tokens // 128, dtype=torch.bool)
    layout[:2] = True
    layout[:, :2] = True
    return BlockMask.from_layout(layout, block=128)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", ["causal", "butterfly", "small blocks", "global rows", "lengths", "dense"])
def test_a_row_has_the_same_bits_in_a_batch_of_64(kind, dim, dtype):
    tokens = 8192 if kind == "global rows" else 1024
    made = {
        "causal": lambda: masks.causal(tokens),
        "butterfly": lambda: masks.butterfly(tokens, block=64),
        "small blocks": lambda: masks.local(tokens, window=100, block=16),
        "global rows": lambda: global_rows_and_columns(tokens),
        "lengths": lambda: masks.causal(tokens).with_lengths([1000]),
        "dense": lambda: None,
    }[kind]()
    mask = None if made is None else made.to("cuda")
    batch = 16 if kind == "global rows" else 64
    same_bits(mask, dim, dtype, batch=batch, heads=4, tokens=tokens, device="cuda")


@pytest.mark.gpu
def test_a_query_that_sees_very_many_keys_has_the_same_bits_in_a_batch():
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(64, 4, 1, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(64, 4, 16384, 64, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    together = results(q, k, v, None)
    alone = results(q[5:6], k[5:6], v[5:6], None)
    for got, want in zip(alone, together, strict=True):
        assert torch.equal(got, want[5:6])
