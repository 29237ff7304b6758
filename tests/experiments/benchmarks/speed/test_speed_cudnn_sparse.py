from dataclasses import replace

import pytest
import torch

from experiments.benchmarks.harness import Unavailable
from experiments.benchmarks.speed.cases import Case
from experiments.benchmarks.speed.patterns import block_mask, pattern
from experiments.benchmarks.speed.peers import cudnn_block_sparse
from experiments.benchmarks.speed.run import make_inputs
from sparseflash import BlockMask, attention

CPU = torch.device("cpu")
CASE = Case("case", "butterfly", 2, 2, 1024, 16, dtype=torch.float32)


def mask_of(options):
    index, counts = options["q2k_block_index"], options["q2k_block_nums"]
    live = torch.arange(index.shape[-1]) < counts[..., None]
    counted = torch.zeros(*index.shape[:3], index.shape[2], dtype=torch.int32)
    counted.scatter_add_(3, index.long(), live.int())  # what follows the counts is not read
    return BlockMask.from_layout(counted > 0, block=options["sparse_block_size"])


def forward(q, k, v, **options):
    out, lse = attention(q, k, v, mask_of(options), return_lse=True)
    return {"o_tensor": out, "lse_tensor": lse}


def backward(dout, q, k, v, out, lse, **options):
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        again = attention(q, k, v, mask_of(options))
        assert torch.equal(again, out)
        return dict(zip(("dq_tensor", "dk_tensor", "dv_tensor"), torch.autograd.grad(again, (q, k, v), dout)))


PACKAGE = cudnn_block_sparse.Package(forward, backward)


@pytest.mark.parametrize("block", [128, 64])
@pytest.mark.parametrize("kind", ["dense", "butterfly", "local", "bigbird", "random12"])
def test_the_lists_say_our_mask(kind, block):
    case = replace(CASE, kind=kind, block=block)
    options = cudnn_block_sparse.arguments(case, pattern(case))
    assert options["q2k_block_index"].dtype == options["q2k_block_nums"].dtype == torch.int32
    assert torch.equal(mask_of(options).to_dense()[1, 1], block_mask(kind, case.length, block).to_dense()[0, 0])


def test_output_and_gradients_are_those_of_the_package():
    live, inputs = pattern(CASE), make_inputs(CASE, CPU)
    found = cudnn_block_sparse.runner(CASE, live, inputs, PACKAGE).step()
    out = attention(inputs.q, inputs.k, inputs.v, block_mask(CASE.kind, CASE.length, CASE.block))
    expected = out.detach(), *torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.dout)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("changes", "reason"), [({"kind": "causal"}, "full tiles only"), ({"block": 32}, "blocks of 64 or 128 only")]
)
def test_what_it_cannot_serve_is_said(changes, reason):
    case = replace(CASE, **changes)
    with pytest.raises(Unavailable, match=reason):
        cudnn_block_sparse.arguments(case, pattern(case))


def test_without_the_package_there_is_a_reason():
    with pytest.raises(Unavailable, match="not installed"):
        cudnn_block_sparse.load()
