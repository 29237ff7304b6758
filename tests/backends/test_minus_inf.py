"""-inf as a score is dead, as in a mask: in every backend and dtype, for every kind of change."""

from dataclasses import replace

import pytest
import torch

from sparseflash import BlockMask, attention, scores
from sparseflash.backends.triton.overrides import override
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.interop import from_score_mod
from tests.backends.triton.plans import chunks_of
from tests.compared.exactness import HALF
from tests.compared.minus_inf import KINDS, Case

CPU = [
    ("reference", torch.float64), ("reference", torch.float32), ("reference", torch.float16),
    ("blockwise", torch.float64), ("blockwise", torch.float32), ("blockwise", torch.float16),
    ("triton", torch.float32), ("triton", torch.float16),
]  # fmt: skip


@pytest.mark.parametrize(("backend", "dtype"), CPU, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("kind", KINDS)
def test_a_score_of_minus_inf_is_dead(kind, backend, dtype):
    Case(kind, dtype).check(backend)


def widest_gathered(tilings: list[Tiling]) -> Tiling:
    found = [tiling for tiling in tilings if tiling.gathered]
    assert found  # otherwise nothing here would be gathered
    return max(found)


BESIDE = {
    "changes": {"others": ("softcap", "alibi", "sink")},
    "dropout": {"dropout": 0.3},
    "lengths": {"lengths": (40, 29, 40, 40, 9)},
    "no mask": {"whole": True},
    "half": {"half": True, "others": ("sink",)},
}
# Without a sink, so that dead rows have an lse of -inf.
BESIDE["all"] = BESIDE["dropout"] | BESIDE["lengths"] | {"others": ("softcap", "alibi")}


@pytest.mark.parametrize(("beside", "dtype"), [
    *((beside, torch.float16) for beside in BESIDE if beside != "all"), ("all", torch.float32),
], ids=lambda x: str(x).removeprefix("torch."))  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_a_score_of_minus_inf_is_dead_beside_others(kind, beside, dtype):
    case = Case(kind, dtype, **BESIDE[beside])
    if case.lengths is not None:
        case = replace(case, lengths=case.lengths[: case.batch])
    case.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_score_of_minus_inf_is_dead_in_chunks(kind, dtype):
    with chunks_of(16):
        Case(kind, dtype, others=("sink",), dropout=0.2).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("kind", ["bias", "key_bias", "relative", "where", "function"])
def test_a_score_of_minus_inf_is_dead_in_gathered_tiles(kind, dtype):
    with override(tiling=widest_gathered):
        Case(kind, dtype).check()


def is_near(q, k):
    """A window: the first tiles of late queries are dead."""
    return (q - k).abs() < 5


SCORE_MODS = {
    "where": lambda s, b, h, q, k: torch.where(is_near(q, k), s, -torch.inf),
    "masked_fill": lambda s, b, h, q, k: s.masked_fill(~is_near(q, k), -torch.inf),
    "sum": lambda s, b, h, q, k: s + torch.where(is_near(q, k), 0.0, -torch.inf),
    "logarithm": lambda s, b, h, q, k: s + torch.log(is_near(q, k).float()),
}


@pytest.mark.parametrize(("device", "dtype"), [
    ("cpu", torch.float32), ("cpu", torch.float16),
    *(pytest.param("cuda", each, marks=pytest.mark.gpu) for each in (*HALF, torch.float32)),
])  # fmt: skip
@pytest.mark.parametrize("written", SCORE_MODS)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_a_score_mod_that_gives_minus_inf_does_what_a_mask_does(written, device, dtype):
    tokens = 80 if device == "cpu" else 700
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 2, tokens, 16, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)]
    changes = from_score_mod(SCORE_MODS[written], tokens, device=device)
    near = BlockMask.from_function(is_near, tokens, block=16).to(device)
    found = attention(*given, scores=changes, backend="triton", return_lse=True)
    wanted = attention(*given, near, backend="triton", return_lse=True)
    found += torch.autograd.grad(found[0].square().sum(), given)
    wanted += torch.autograd.grad(wanted[0].square().sum(), given)
    eps = 8 * torch.finfo(dtype).eps
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=eps, atol=eps * float(y.detach().abs().max()))


LOW = {
    "bias": lambda values: scores.bias(values.expand(1, 1, 80, 80)),
    "key_bias": lambda values: scores.key_bias(values.view(1, 1, 80)),
    "relative": lambda values: scores.relative(values[79:].expand(2, 1), torch.zeros_like),  # one entry
    "function": lambda values: scores.function(lambda s, b, h, q, k, values: s + values[k], values),
}


@pytest.mark.parametrize("lowest", [-1e9, -1e30, *(torch.finfo(each).min for each in (torch.bfloat16, torch.float32))])
@pytest.mark.parametrize(("backend", "dtype"), [
    *(case for case in CPU if case[0] == "triton" or case[1] == torch.float32),
    *(pytest.param("cuda", each, marks=pytest.mark.gpu) for each in (*HALF, torch.float32)),
])  # fmt: skip
@pytest.mark.parametrize("kind", LOW)
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_low_finite_scores_are_not_dead(kind, backend, dtype, lowest):
    device, backend = ("cuda", "triton") if backend == "cuda" else ("cpu", backend)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 80, 16, generator=generator).to(device, dtype) for _ in range(3))
    k = torch.zeros_like(k)  # so that scores are equal, whatever is lost of them
    place = torch.arange(80, device=device)
    for is_low in (place >= 0, place < 50, place >= 50):
        values = torch.zeros(80, device=device).masked_fill(is_low, lowest)
        made = LOW[kind](values)
        out, lse = attention(q, k, v, scores=made, return_lse=True, backend=backend)
        seen = place >= 0 if kind == "relative" or is_low.all() else ~is_low
        want = v.double()[:, :, seen].mean(2, keepdim=True).expand_as(out)
        eps = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(out.double(), want, rtol=eps, atol=eps)
        assert lse.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "triton"], ids=["default", "triton"])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_a_score_of_minus_inf_is_dead_on_the_gpu(kind, dim, dtype, backend):
    large = {"tokens": 700, "tile": 256, "block": 128, "dim": dim}
    Case(kind, dtype, **large).check(backend, "cuda")
    if dim == 64:
        for beside in BESIDE.values():
            lengths = (700, 430, 700, 700, 3) if "lengths" in beside else None
            case = Case(kind, dtype, **{**large, **beside, "lengths": lengths})
            case = case if lengths is None else replace(case, lengths=lengths[: case.batch])
            case.check(backend, "cuda")
        with chunks_of(128):
            Case(kind, dtype, **large).check(backend, "cuda")
