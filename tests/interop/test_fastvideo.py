"""FastVideo's definition: the first tokens of each listed block, and lse to the base 2."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash.interop.fastvideo import block_sparse_attn_from_indices


@given(seed=st.integers(0, 999), block=st.sampled_from([16, 64]), rows=st.integers(1, 4), columns=st.integers(1, 4))
def test_it_is_its_definition(seed, block, rows, columns):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = inputs = [
        torch.randn(2, 2, n * block, 16, generator=generator, dtype=torch.float64).requires_grad_()
        for n in (rows, columns, columns)
    ]
    index = torch.rand(2, 2, rows, columns, generator=generator).argsort(-1).int()
    counts = torch.randint(0, columns + 1, (2, 2, rows), generator=generator, dtype=torch.int32)
    sizes = torch.randint(1, block + 1, (columns,), generator=generator, dtype=torch.int32)
    out, lse = block_sparse_attn_from_indices(*inputs, index, counts, sizes)
    live = torch.zeros(2, 2, rows * block, columns * block, dtype=torch.bool)
    for b, h, i in torch.ones(2, 2, rows).nonzero().tolist():
        for j in index[b, h, i, : counts[b, h, i]].tolist():
            live[b, h, i * block : (i + 1) * block, j * block : j * block + int(sizes[j])] = True
    s = (q @ k.mT / math.sqrt(16)).masked_fill(~live, -torch.inf)
    want = s.softmax(-1).masked_fill(~live, 0.0) @ v
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, (s.logsumexp(-1) / math.log(2)).to(lse.dtype))
    dout = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    for a, b in zip(torch.autograd.grad(out, inputs, dout), torch.autograd.grad(want, inputs, dout), strict=True):
        torch.testing.assert_close(a, b.nan_to_num(0.0))


def test_sizes_that_do_not_fit_are_refused():
    q = torch.zeros(1, 1, 100, 16)
    index, counts = torch.zeros(1, 1, 2, 1, dtype=torch.int32), torch.ones(1, 1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=re.escape("variable_block_sizes must have one entry for each block of keys")):
        block_sparse_attn_from_indices(q, q, q, index, counts, torch.full((3,), 64))
