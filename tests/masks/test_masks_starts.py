"""The kernels that write tiles sum the counts of few rows themselves."""

from unittest import mock

import pytest
import torch
import triton.language as tl

from sparseflash import BlockMask, masks
from sparseflash.masks import fused
from sparseflash.masks.fused import index, rows, starts

AT_ONCE = 16  # rows that a program sums
MANY = 20


def by(way):
    return mock.patch.object(fused, "_DEVICES", ["cpu"] if way == "kernels" else [])


def assert_same(got, want):
    """The unused room may hold anything that is safe to run."""
    used = int(want.indptr[-1])
    assert torch.equal(got.indptr.cpu(), want.indptr) and len(got.indices) == len(want.indices)
    for name in ("indices", "tile"):
        assert torch.equal(getattr(got, name)[:used].cpu(), getattr(want, name)[:used]), name
    assert not got.indices[used:].any() and not got.tile[used:].any()


def by_scores(count, device="cpu"):
    scores = torch.rand(1, 2, count, 5, generator=torch.Generator().manual_seed(count))
    scores[:, :, ::3] = -torch.inf  # empty rows
    return masks.mass_blocks(scores.to(device), mass=0.5, q_len=16 * count, k_len=80, block=16)


def by_lists(count, device="cpu"):
    chosen = torch.randint(-1, 5, (1, 2, count, 3), dtype=torch.int32, generator=torch.Generator().manual_seed(count))
    chosen[:, :, ::3] = -1
    return BlockMask.from_block_index(chosen.to(device), q_len=16 * count, k_len=80, block=16)


@pytest.mark.parametrize(("make", "module", "last"), [(by_scores, rows, "_listing"), (by_lists, index, "_storing")])
@pytest.mark.parametrize(("count", "most"), [(3, 2048), (MANY, 2 * MANY), (MANY, 2 * MANY - 1)])
def test_sums_by_the_kernels_are_those_of_an_operation(make, module, last, count, most):
    assert starts.MOST_SUMMED >= 2048 > starts._AT_ONCE.value
    at_once = mock.patch.object(starts, "_AT_ONCE", tl.constexpr(AT_ONCE))
    with by("operations"):
        want = make(count)
    launches = mock.patch.object(module, last, wraps=getattr(module, last))
    with by("kernels"), mock.patch.object(module, "MOST_SUMMED", most), at_once, launches as asked:
        got = make(count)
    assert asked.call_args.args[-1] == (2 * count > most)
    assert_same(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [by_scores, by_lists])
@pytest.mark.parametrize("count", [3, 700, 5000])
def test_on_a_gpu_they_are_those_of_an_operation(make, count):
    with by("operations"):
        want = make(count)
    with mock.patch.object(fused, "_DEVICES", ["cuda"]):
        got = make(count, "cuda")
    assert_same(got, want)
