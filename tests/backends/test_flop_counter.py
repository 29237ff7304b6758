import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from sparseflash import BlockMask, analysis, attention, masks
from sparseflash.backends.flop_counter import scores
from sparseflash.backends.problem import Problem
from tests.drawn.masks import block_masks
from tests.processes.forked import python

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="the kernel runs in the interpreter"))


def counted(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def qkv(mask, batch=1, heads=2, kv_heads=1, dim=16, v_dim=16):
    shapes = ((heads, mask.q_len, dim), (kv_heads, mask.k_len, dim), (kv_heads, mask.k_len, v_dim))
    return [torch.randn(batch, *shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("backend", ["blockwise", TRITON])
def test_forward_and_backward_are_counted_as_the_analysis_does(backend):
    mask = masks.per_head([masks.butterfly(64, block=16), masks.local(64, window=32, block=16)])
    q, k, v = qkv(mask, v_dim=32)
    forward = analysis.flops(mask, 16, 32).computed
    backward = analysis.flops(mask, 16, 32, backward=True).computed
    with torch.no_grad():
        assert counted(lambda: attention(q, k, v, mask, backend=backend)) == forward
    assert counted(lambda: attention(q, k, v, mask, backend=backend).sum().backward()) == forward + backward


def test_a_backward_is_counted_whose_forward_was_not():
    script = """if True:
        import torch
        from torch.utils.flop_counter import FlopCounterMode
        from sparseflash import attention
        q = torch.randn(1, 1, 32, 16, requires_grad=True)
        out = attention(q, q, q)
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        print(counter.get_total_flops())"""
    done = python("-c", script)
    assert int(done.stdout) == 5 * 2 * 32 * 32 * 16


def test_fake_inputs_under_a_real_mask_are_counted():
    mask = masks.butterfly(128, block=16)
    q, k, v = qkv(mask)
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes, FlopCounterMode(display=False) as counter:
        attention(*(fakes.from_tensor(x) for x in (q, k, v)), mask)
    assert counter.get_total_flops() == analysis.flops(mask, 16, heads=2).computed


def test_dense_attention_counts_as_pytorchs_own():
    q, k, v = qkv(BlockMask.dense(48), kv_heads=2)
    ours = counted(lambda: attention(q, k, v).sum().backward())
    scores = torch.matmul(q.detach(), k.detach().mT)
    one = counted(lambda: torch.matmul(q, k.mT))
    assert one == 2 * scores.numel() * 16 and ours == 7 * one


@given(mask=block_masks(most_tokens=100, batch=2, heads=2), batch=st.sampled_from([2, 4]))
def test_every_head_is_counted_with_its_own_pattern(mask, batch):
    mask = mask.bake_lengths()
    size = batch if mask.shape[0] in (1, batch) else mask.shape[0]
    q, k, _ = qkv(mask, batch=size)
    each = mask.to_layout().expand(size, 2, -1, -1).sum().item()
    assert scores(q, k, Problem.of(mask, scale=1.0)) == each * mask.block_q * mask.block_k


def test_fake_tensors_are_counted_by_the_mean_of_the_patterns():
    mask = masks.butterfly(128, block=16)
    with FakeTensorMode() as fakes:
        q, k, _ = (fakes.from_tensor(x.detach()) for x in qkv(mask))
        problem = Problem.of(mask, scale=1.0)
        problem = problem._replace(**{
            name: fakes.from_tensor(x) for name, x in problem._asdict().items() if isinstance(x, torch.Tensor)
        })  # fmt: skip
        found = scores(q, k, problem)
    assert found == analysis.density(mask).live_tiles * 2 * 16 * 16


def test_a_counter_imported_first_or_last_counts_the_first_call():
    for order in ("flop_counter first", "sparseflash first"):
        lines = ["from torch.utils.flop_counter import FlopCounterMode", "from sparseflash import attention"]
        script = "\n".join(
            [
                "import torch",
                *(lines if order == "flop_counter first" else lines[::-1]),
                "q = torch.randn(1, 1, 32, 16)",
                "with FlopCounterMode(display=False) as counter:",
                "    attention(q, q, q)",
                "print(counter.get_total_flops())",
            ]
        )
        done = python("-c", script)
        assert int(done.stdout) == 2 * 2 * 32 * 32 * 16, order


def test_importing_sparseflash_does_not_import_the_counter():
    script = "import sys, sparseflash; print('torch.utils.flop_counter' in sys.modules)"
    done = python("-c", script)
    assert done.stdout.strip() == "False"
