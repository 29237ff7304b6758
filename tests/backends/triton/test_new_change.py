"""A new score modification is its formula, one file with its device functions, and its lines in `kinds.py`."""

import pytest
import torch

from sparseflash import attention, attention_varlen, explain, masks, scores
from sparseflash.backends.triton.changes import kinds
from sparseflash.distributed.scores import refuse_local
from sparseflash.grouped import selected_attention
from sparseflash.scores.change import Scores, Sizes, put_together
from tests.backends.triton.hopper.hopper_problems import interpreted
from tests.backends.triton.new_change.formula import LearnedCap
from tests.backends.triton.new_change.kernels import LearnedCapKind, LearnedCapOnHopper
from tests.compiling.uninterpreted import python


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(kinds.KINDS, "learned_cap", LearnedCapKind)
    monkeypatch.setitem(kinds.HOPPER_KINDS, "learned_cap", LearnedCapOnHopper)


def gradients(change, q, k, v, dout, mask, *, learned, **how):
    tensors = [q, k, v, *learned]
    out = attention(q, k, v, mask, scores=change, **how)
    return [out, *torch.autograd.grad(out, tensors, dout)]


def problem(dtype, tokens, dim):
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, tokens, dim, generator=generator).to(dtype) for _ in range(4))
    return *(x.requires_grad_() for x in (q * 3, k, v)), dout, torch.tensor([1.5, 4.0])


@pytest.mark.parametrize("beside", [(), (scores.alibi(torch.tensor([0.5, 0.1])), scores.sink(torch.ones(2)))], ids=len)
@pytest.mark.parametrize("backend", ["triton", "blockwise"])
def test_it_has_the_gradients_of_its_formula_and_of_the_function_that_users_write(backend, beside):
    q, k, v, dout, gain = problem(torch.float32, 72, 32)
    gain.requires_grad_()
    mask = masks.local(72, window=30, block=16)
    got = gradients(
        sum(beside, Scores((LearnedCap(gain),))), q, k, v, dout, mask, learned=[gain], backend=backend
    )  # fmt: skip
    x = [each.detach().double().requires_grad_() for each in (q, k, v)]
    wide = gain.detach().double().requires_grad_()
    change = Scores((LearnedCap(wide),))
    if not beside:
        change = scores.function(lambda s, b, h, q, k, gain: gain[h] * torch.tanh(s / gain[h]), wide)
    truth = gradients(sum(beside, Scores(()) + change), *x, dout.double(), mask, learned=[wide], backend="reference")
    for mine, right in zip(got, truth, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-4)


def test_an_operator_takes_it_apart_and_puts_it_together():
    change = Scores((LearnedCap(torch.ones(2)),)) + scores.softcap(3.0)
    assert put_together(change.described(), change.tensors()).kinds == ("learned_cap", "softcap")


@pytest.mark.parametrize("dim", [64, 128])
def test_the_hopper_kernels_take_it(dim):
    q, k, v, dout, gain = (x.detach() for x in problem(torch.float16, 256, dim))
    mask = masks.causal(256, block=128)
    change = Scores((LearnedCap(gain),)).prepared(Sizes(1, 2, 256, 256, q.device, mask))
    out, _, *found = interpreted(mask, q, k, v, dim**-0.5, dout, changes=change)
    x = [each.double().requires_grad_() for each in (q, k, v)]
    truth = gradients(change, *x, dout.double(), mask, learned=[], backend="reference")
    for mine, right in zip([out, *found], truth, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=0, atol=2e-3 * right.abs().max().item())


def test_the_hopper_kernels_that_take_it_compile():
    source = (
        "import torch\n"
        "from unittest import mock\n"
        "from experiments.benchmarks.compile import hopper\n"
        "from sparseflash.backends.triton.changes import kinds\n"
        "from sparseflash.scores.change import Scores\n"
        "from tests.backends.triton.new_change.formula import LearnedCap\n"
        "from tests.backends.triton.new_change.kernels import LearnedCapOnHopper\n"
        "kinds.HOPPER_KINDS['learned_cap'] = LearnedCapOnHopper\n"
        "change = Scores((LearnedCap(torch.ones(2)),))\n"
        "with mock.patch.object(hopper, '_changes', lambda *of: change):\n"
        "    found = hopper.compiled(64, torch.bfloat16)\n"
        "print(*(found[name][0].asm['ptx'].count('tanh.approx') for name in ('forward_kernel', 'backward_kernel')))"
    )
    done = python("-c", source)
    assert done.returncode == 0, done.stderr[-3000:]
    of_forward, of_backward = map(int, done.stdout.split())
    assert of_forward == 2 * 64 and of_backward == 64, "one a score of a thread, in each warpgroup of the forward"


def test_beside_others_they_refuse_it_by_name():
    q = torch.empty(1, 2, 256, 64, dtype=torch.bfloat16)
    change = Scores((LearnedCap(torch.ones(2)),))
    found = explain(q, q, q, masks.causal(256, block=128), scores=change + scores.softcap(3.0), capability=(9, 0))
    assert "only alone or beside a sink; got it beside softcap" in str(found)


def test_calls_that_place_tokens_or_heads_refuse_it_until_they_place_its_tensors():
    """Otherwise a head would get the parameter of another head, without a word."""
    change, q, packed = Scores((LearnedCap(torch.ones(2)),)), torch.zeros(1, 2, 64, 16), torch.zeros(64, 2, 16)
    index = torch.zeros(1, 2, 64, 1, dtype=torch.int64)
    for call, where in (
        (lambda: attention_varlen(packed, packed, packed, [0, 20, 64], scores=change), "of packed sequences"),
        (lambda: selected_attention(q, q, q, index, scores=change), "of selected_attention"),
        (lambda: refuse_local(change), "over several ranks"),
    ):
        with pytest.raises(ValueError, match=f"scores {where} must be of temperature, .* sink; got learned_cap"):
            call()
