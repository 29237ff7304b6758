import pytest
import torch

from sparseflash import BlockMask, interop, masks
from sparseflash.interop.dead_runs import dead_runs
from tests.compared.portions import assert_same_in_portions
from tests.processes.forked import python


def test_every_function_is_public_and_documented():
    for name in interop.__all__:
        function = getattr(interop, name)
        assert function.__doc__, name
        if name.startswith(("to_", "from_")):
            assert ">>>" in function.__doc__, f"{name} needs an example"
            assert f"`{name}`" in interop.__doc__, f"{name} is missing from the table"
    assert {name for name in vars(interop) if name.startswith(("to_", "from_"))} <= set(interop.__all__)


def test_no_neighbour_is_imported_before_it_is_asked_for():
    program = """
import sys

import sparseflash.interop

heavy = ("scipy", "torch.nn.attention.flex_attention", "flash_attn", "flashinfer", "deepspeed", "paddle")
found = [name for name in heavy if name in sys.modules]
assert not found, found
"""
    before = python("-c", program.replace("sparseflash.interop", "torch"))
    if before.returncode:
        pytest.skip(f"import torch alone fails this: {before.stderr.strip().splitlines()[-1]}")
    done = python("-c", program)
    assert done.returncode == 0, done.stderr


WHOLE = BlockMask.dense(256)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: interop.to_scipy(WHOLE, head=1.5), TypeError, "head must be an integer; got 1.5"),
        (lambda: interop.to_torch_sparse(WHOLE, batch=True), TypeError, "batch must be an integer; got True"),
        (lambda: interop.to_flashinfer(WHOLE, head=None, batch="0"), TypeError, "batch must be an integer; got '0'"),
        (lambda: interop.to_deepspeed(WHOLE, heads=0), ValueError, "heads must be at least 1; got 0"),
        (lambda: interop.to_deepspeed(WHOLE, heads=-1), ValueError, "heads must be at least 1; got -1"),
        (lambda: interop.to_flashmask(WHOLE, kv_heads=0), ValueError, "kv_heads must divide the mask's 1 heads; got 0"),
        (lambda: interop.to_flashmask(WHOLE, kv_heads=2.0), TypeError, "kv_heads must be an integer; got 2.0"),
        (lambda: interop.to_flashmask(WHOLE, causal="no"), TypeError, "causal must be True or False; got 'no'"),
        (lambda: interop.to_fa4(WHOLE, partial="no"), TypeError, "partial must be True or False; got 'no'"),
        (lambda: interop.from_fa4(interop.to_fa4(WHOLE).forward, 256.0, 256), TypeError, "q_len must be an integer"),
        (lambda: interop.from_fa4(interop.to_fa4(WHOLE).forward, 256, None), TypeError, "k_len must be an integer"),
    ],
)
def test_numbers_and_flags_are_checked(call, error, words):
    with pytest.raises(error, match=words):
        call()


def two_heads():
    return masks.per_head([masks.documents([20, 50, 30], causal=True, block=16), masks.local(100, window=9, block=16)])


def runs_until_there_are_too_many():
    mask = BlockMask.from_function(lambda q, k: (k < 70) | (q % 20 < 5), 100, block=16)
    return [x.tolist() if isinstance(x, torch.Tensor) else x for x in dead_runs(mask, 0)]


def runs_of_keys():
    return interop.from_flashmask(interop.to_flashmask(two_heads()).startend_row_indices, causal=False, block=16)


@pytest.mark.parametrize(
    ("module", "name", "make"),
    [
        ("dead_runs", "SCORES_AT_ONCE", runs_until_there_are_too_many),
        ("interval_tiles", "SCORES_AT_ONCE", runs_of_keys),
        ("lists", "SCORES_AT_ONCE", lambda: interop.from_flex(interop.to_flex(two_heads()))),
        ("scores", "SCORES_AT_ONCE", lambda: interop.to_scipy(two_heads(), head=1).toarray().tolist()),
    ],
    ids=["dead_runs", "interval_tiles", "lists", "scores"],
)
def test_what_is_converted_in_portions_is_the_same(module, name, make):
    assert_same_in_portions(make, f"sparseflash.interop.{module}", name)
