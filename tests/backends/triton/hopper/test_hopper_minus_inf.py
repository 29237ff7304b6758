from dataclasses import replace
from functools import partial

import pytest
import torch

from sparseflash.backends.triton.hopper.configs import HEAD_DIMS
from tests.backends.triton.hopper.hopper_problems import CUT, HALF, PARTS, interpreted
from tests.compared.minus_inf import Case

CASES = {
    "bias": Case("bias", torch.float16, half=True),
    "shared bias": Case("shared bias", torch.float16, half=True, learned=False),
    "key_bias": Case("key_bias", torch.float16),
    "key_bias+alibi": Case("key_bias", torch.float16, others=("alibi",)),
    "tile bias": Case("tile bias", torch.float16, half=True),
    "relative": Case("relative", torch.float16),
}


HOW = ("plain", "sink", "lengths", "cut")


def case_of(kind, dtype, dim, how, tokens):
    case = replace(CASES[kind], dtype=dtype, dim=dim, tokens=tokens, tile=128, block=128)
    if how == "sink":
        case = replace(case, others=(*case.others, "sink"))
    if how == "lengths":
        case = replace(case, lengths=(tokens, tokens - 96, tokens, tokens, 5)[: case.batch])
    return case


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float16), (128, torch.bfloat16)])
@pytest.mark.parametrize("kind", CASES)
def test_a_score_of_minus_inf_is_dead(kind, dim, dtype, how):
    rules = {"rule": CUT, "cut": PARTS} if how == "cut" else {}
    case_of(kind, dtype, dim, how, 296).check(partial(interpreted, **rules))


@pytest.mark.gpu
@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", HALF, ids=["fp16", "bf16"])
@pytest.mark.parametrize("kind", CASES)
def test_a_score_of_minus_inf_is_dead_on_the_gpu(kind, dtype, dim):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a GPU of compute capability 9")
    for how in HOW[:3]:
        case_of(kind, dtype, dim, how, 1000).check("hopper", "cuda")
