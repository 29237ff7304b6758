import pytest
import torch

from sparseflash import attention, scores
from tests.compared.exactness import HALF


@pytest.mark.parametrize(("device", "dtype"), [
    ("cpu", torch.float16), *(pytest.param("cuda", each, marks=pytest.mark.gpu) for each in HALF),
])  # fmt: skip
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("keys", [1, 2, 70])
@pytest.mark.parametrize("kind", ["bias", "shared bias", "key_bias"])
def test_they_are_off_by_what_out_was_rounded_by(kind, keys, dropout, device, dtype):
    generator = torch.Generator().manual_seed(0)
    queries = 70
    q, dout = (torch.randn(1, 2, queries, 32, generator=generator).to(device, dtype) for _ in range(2))
    k, v = (torch.randn(1, 2, keys, 32, generator=generator).to(device, dtype) for _ in range(2))
    high = 8.0 * (torch.arange(queries)[:, None] % keys == torch.arange(keys))
    values = {"bias": high.expand(1, 2, -1, -1), "shared bias": high.expand(1, 1, -1, -1), "key_bias": high[:1, None]}
    learned = values[kind].clone().to(device).requires_grad_()

    def results(backend, dtype, values, v):
        change = scores.key_bias(values) if kind == "key_bias" else scores.bias(values)
        return attention(
            q.to(dtype), k.to(dtype), v.to(dtype), scores=scores.softcap(1.5) + change, dropout_p=dropout, seed=1,
            backend=backend, return_lse=True,
        )  # fmt: skip

    exact = learned.detach().double().requires_grad_()
    got = torch.autograd.grad(results("triton", dtype, learned, v)[0], learned, dout)[0]
    truth = torch.autograd.grad(results("reference", torch.float64, exact, v)[0], exact, dout.double())[0]
    # Each gradient of a score: its weight, times the sum over d of |dout_d| times the mean of |v_d| of the query.
    absolute, lse = results("reference", torch.float64, exact, v.abs())
    sizes = (absolute.detach() * dout.double().abs()).sum(-1)
    allowed = torch.finfo(dtype).eps * torch.autograd.grad(lse, exact, sizes)[0]
    allowed += 2**-16 * truth.abs().max()  # of the weights: the score, which is below 16, times 2^-20
    assert ((got.double() - truth).abs() <= allowed).all()
