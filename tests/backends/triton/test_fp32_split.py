import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparseflash import attention, masks
from sparseflash.backends.problem import Problem
from sparseflash.backends.triton.architecture import architecture_of
from sparseflash.backends.triton.device import capability_of
from sparseflash.backends.triton.device_functions import fp32_split
from sparseflash.backends.triton.device_functions.fp32_split import (
    PIECE_COUNT,
    PIECES,
    PIECES_CORRECTED,
    in_pieces,
    precision_of,
    products,
    six_products,
)
from sparseflash.backends.triton.launcher import OPTIONS
from sparseflash.backends.triton.portable.choice import wants_pieces
from sparseflash.backends.triton.prepared_call import setting_of
from sparseflash.blockmask import streams
from tests.interpreting.products import summed_as_by_tensor_cores


@given(
    shape=st.tuples(*[st.integers(1, 3)] * 2, st.integers(1, 70), st.integers(1, 40)),
    exponents=st.tuples(st.integers(-60, 60), st.integers(0, 60)),
    seed=st.integers(0, 2**31),
)
def test_the_pieces_sum_to_the_number_and_have_eight_bits_each(shape, exponents, seed):
    generator = torch.Generator().manual_seed(seed)
    least, more = exponents
    scale = torch.randint(least, least + more + 1, shape, generator=generator)
    x = torch.ldexp(torch.randn(shape, generator=generator), scale)
    pieces = in_pieces(x, 64).double()
    assert pieces.shape == (*shape[:3], PIECE_COUNT, 64)
    assert torch.equal(pieces, pieces.bfloat16().double())
    assert not pieces[..., shape[3] :].any()
    first, second, third = pieces[..., : shape[3]].unbind(-2)
    assert ((first + second + third - x.double()).abs() <= 2.0**-25 * x.double().abs()).all()
    assert (second.abs() <= 2.0**-8 * x.abs()).all()
    assert (third.abs() <= 2.0**-16 * x.abs()).all()


@pytest.mark.parametrize("layout", ["tokens first", "expanded", "slice"])
def test_tensors_of_any_strides_are_split(layout):
    x = {
        "tokens first": lambda: torch.randn(2, 40, 3, 24).transpose(1, 2),
        "expanded": lambda: torch.randn(2, 1, 40, 24).expand(2, 3, 40, 24),
        "slice": lambda: torch.randn(2, 3, 40, 32)[..., 3:27],
    }[layout]()
    assert torch.equal(in_pieces(x, 32), in_pieces(x.contiguous(), 32))


def test_the_largest_numbers_are_split_and_what_is_no_number_stays_none():
    most = torch.finfo(torch.float32).max
    x = torch.tensor([most, -most, 3.39e38, 3.3900001e38]).view(1, 1, 1, -1)
    assert torch.equal(in_pieces(x, 16).double().sum(-2)[..., :4], x.double())
    poison = torch.full((1, 1, 1, 1), -1, dtype=torch.int32).view(torch.float32)
    nothing = torch.cat([torch.tensor([torch.inf, -torch.inf, torch.nan]).view(1, 1, 1, 3), poison], -1)
    with np.errstate(invalid="ignore"):
        pieces = in_pieces(nothing, 16)
    assert pieces.double().sum(-2)[..., :4].isnan().all()


def is_split(q, k, v, mask=None, capability=(9, 0), tf32=False):
    problem = Problem.of(mask, scale=1.0) if mask is not None else Problem.of(None, scale=1.0)
    setting = setting_of(q, k, problem, capability)._replace(tf32=tf32)
    return wants_pieces(q, v, setting, q.shape[1] // k.shape[1])


def test_keys_that_few_queries_read_are_not_split_before():
    for mask, heads, split in (
        (masks.streaming(1, window=64, sink=4, k_len=4096, block=32), 1, False),
        (masks.streaming(1, window=64, sink=4, k_len=4096, block=32), 4, True),
        (masks.local(4096, window=64, block=32), 1, True),
    ):
        q, k, v = (torch.randn(1, h, n, 16) for h, n in ((heads, mask.q_len), (1, mask.k_len), (1, mask.k_len)))
        assert is_split(q, k, v, mask) == split


def test_a_new_layout_is_refused_while_a_graph_is_recorded(monkeypatch):
    q, k, v = (torch.randn(1, 2, 96, 16) for _ in range(3))
    mask = masks.local(96, window=64, block=32)
    attention(q, k, v, mask, backend="triton")
    monkeypatch.setattr(streams, "is_capturing", lambda device: True)
    attention(q, k, v, mask, backend="triton")
    other = k.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(RuntimeError, match="call it once with the same mask and tensors of the same layout"):
        attention(q, other, v, mask, backend="triton")


@pytest.mark.parametrize(
    ("dtype", "tf32", "capability", "dim", "split"),
    [
        (torch.float32, False, (9, 0), 256, True),
        (torch.float32, False, (8, 0), 256, True),
        (torch.float32, False, (8, 6), 128, True),
        (torch.float32, False, (8, 6), 256, False),
        (torch.float32, True, (9, 0), 64, False),
        (torch.float16, False, (9, 0), 64, False),
    ],
)
def test_who_is_split(dtype, tf32, capability, dim, split):
    tensors = [torch.randn(1, 1, 256, dim, dtype=dtype) for _ in range(3)]
    assert is_split(*tensors, capability=capability, tf32=tf32) == split


def test_wide_heads_have_no_room_on_consumer_gpus_alone():
    tables = [architecture_of(each).tables for each in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))]
    assert [each.has_room_for_pieces(256) for each in tables] == [
        True, False, False, True, True, False,
    ]  # fmt: skip


@triton.jit
def _product_kernel(
    x_ptr, y_ptr, out_ptr, ROWS: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr, MIRRORED: tl.constexpr
):  # fmt: skip
    at = tl.arange(0, ROWS)[:, None] * (3 * DIM) + tl.arange(0, DIM)[None, :]
    x = tl.load(x_ptr + at), tl.load(x_ptr + DIM + at), tl.load(x_ptr + 2 * DIM + at)
    y = tl.load(y_ptr + at).T, tl.load(y_ptr + DIM + at).T, tl.load(y_ptr + 2 * DIM + at).T
    product = six_products(x, y, PRECISION, MIRRORED)
    tl.store(out_ptr + tl.arange(0, ROWS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :], product)


def product(x: Tensor, y: Tensor, mirrored: bool = False, precision: str | None = None) -> Tensor:
    rows, dim = x.shape
    out = x.new_empty(rows, rows)
    if precision is None:
        precision = precision_of(
            "fp32", in_pieces=True, corrected=architecture_of(capability_of(x.device)).corrects_sums
        )
    pieces = in_pieces(x[None, None], dim), in_pieces(y[None, None], dim)
    _product_kernel[(1,)](*pieces, out, rows, dim, precision, mirrored, **OPTIONS)
    return out


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dim", [16, 64, 256])
def test_six_products_are_as_good_as_one_in_fp32(dim, device):
    generator = torch.Generator().manual_seed(dim)
    x, y = (torch.randn(64, dim, generator=generator).to(device) for _ in range(2))
    truth = x.double() @ y.double().T
    plain = (x @ y.T - truth).abs()
    found = (product(x, y) - truth).abs()
    assert found.max() <= 2 * plain.max() + torch.finfo(torch.float32).eps
    assert found.mean() <= 2 * plain.mean()
    pieces = in_pieces(x[None, None], dim)
    pieces[..., 2, :] = 0
    fewer = pieces.double().sum(-2)[0, 0] @ y.double().T
    assert (fewer - truth).abs().max() > 5 * found.max()


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("draw", [torch.rand, torch.randn])
def test_what_tensor_cores_cut_off_is_made_up_for(draw, dim, monkeypatch):
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", summed_as_by_tensor_cores)
    generator = torch.Generator().manual_seed(dim)
    x, y = (draw(64, dim, generator=generator) for _ in range(2))
    truth = x.double() @ y.double().T

    def errors(precision):
        return (product(x, y, precision=precision.value) - truth) * truth.sign() * 2**24

    left_alone, made_up_for = errors(PIECES), errors(PIECES_CORRECTED)
    assert left_alone.mean() < 0
    assert made_up_for.mean().abs() < 0.7 * left_alone.mean().abs()
    assert made_up_for.square().mean() < 0.85 * left_alone.square().mean()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("precision", [PIECES.value, PIECES_CORRECTED.value])
def test_small_whole_numbers_stay_exact(precision, device):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(-8, 9, (64, 128), generator=generator).float().to(device) for _ in range(2))
    assert torch.equal(product(x, y, precision=precision).double(), x.double() @ y.double().T)


def test_sums_are_corrected_on_the_gpus_that_it_was_fitted_on_alone(monkeypatch):
    assert precision_of("fp32", in_pieces=True, corrected=True) == PIECES.value
    monkeypatch.setattr(fp32_split, "INTERPRETED", False)
    for capability, corrected in (((9, 0), True), ((8, 0), False), ((10, 0), False), ((12, 0), False)):
        for split in (True, False):
            assert (
                "corrected"
                in precision_of("fp32", in_pieces=split, corrected=architecture_of(capability).corrects_sums)
            ) == corrected
    assert (
        precision_of("half", in_pieces=False, corrected=True)
        == precision_of("tf32", in_pieces=False, corrected=False)
        == "tf32"
    )


@triton.jit
def _whole_product_kernel(
    x_ptr, y_ptr, out_ptr, ROWS: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr, MIRRORED: tl.constexpr
):  # fmt: skip
    at = tl.arange(0, ROWS)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    product = products(tl.load(x_ptr + at), tl.load(y_ptr + at), PRECISION, MIRRORED)
    tl.store(out_ptr + tl.arange(0, ROWS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :], product)


def whole_product(x: Tensor, y: Tensor, mirrored: bool = False) -> Tensor:
    out = x.new_empty(len(x), len(x))
    precision = precision_of("fp32", in_pieces=False, corrected=architecture_of(capability_of(x.device)).corrects_sums)
    _whole_product_kernel[(1,)](x, y, out, *x.shape, precision, mirrored, **OPTIONS)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("multiply", [product, whole_product], ids=["pieces", "whole"])
def test_a_product_mirrored_has_the_same_bits(multiply, dim, rows):
    if multiply is product and dim > 128:
        pytest.skip("attention sums them in two halves")
    x, y = (torch.randn(rows, dim, device="cuda") for _ in range(2))
    assert torch.equal(multiply(x, y), multiply(y, x, True).T)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dim", [16, 256])
def test_products_of_whole_tiles_are_as_good_as_in_fp32_and_keep_infinities(dim, device):
    generator = torch.Generator().manual_seed(dim)
    x, y = (torch.randn(32, dim, generator=generator).to(device) for _ in range(2))
    truth = x.double() @ y.double().T
    plain, found = ((each - truth).abs() for each in (x @ y.T, whole_product(x, y)))
    assert found.max() <= 2 * plain.max() + torch.finfo(torch.float32).eps
    x[3, 5], y[7, 2] = torch.inf, -torch.inf
    wanted = (x.double() @ y.double().T).float()
    finite = wanted.isfinite()
    found = whole_product(x, y)
    assert torch.equal(found.isfinite(), finite)
    assert torch.equal(found[~finite].nan_to_num(0.5), wanted[~finite].nan_to_num(0.5))


@pytest.mark.gpu
def test_sums_of_numbers_of_one_sign_are_not_worse_than_in_fp32():
    """Tensor cores truncate low bits."""
    tokens = 8192
    q, k = (torch.rand(1, 2, tokens, 64, device="cuda") for _ in range(2))
    v = torch.rand(1, 2, tokens, 64, device="cuda") + 1
    truth = attention(*(x.double() for x in (q, k, v)), backend="reference")
    found, plain = ((attention(q, k, v, backend=name) - truth).abs() for name in ("triton", "reference"))
    assert found.max() <= 2 * plain.max() + 2 * torch.finfo(torch.float32).eps
    assert found.mean() <= 2 * plain.mean() + torch.finfo(torch.float32).eps


@pytest.mark.gpu
def test_fp32_needs_memory_in_proportion_to_the_tokens():
    """Pieces take six bytes a number."""
    peaks = []
    for tokens in (16_384, 65_536):
        mask = masks.local(tokens, window=256).to("cuda")
        q, k, v = (torch.randn(1, 2, tokens, 64, device="cuda", requires_grad=True) for _ in range(3))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attention(q, k, v, mask).sum().backward()
        peaks.append((torch.cuda.max_memory_allocated() - before) / q.nbytes)
        del q, k, v
    assert peaks[1] < 1.2 * peaks[0]
    assert max(peaks) < 14
