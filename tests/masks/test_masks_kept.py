"""Small masks of known rules are kept by their arguments."""

import inspect

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sparseflash import attention, clear_caches, masks
from sparseflash.blockmask import compiling
from sparseflash.blockmask.cache import SMALL_MASK
from sparseflash.masks.tiling import signatures

pytestmark = pytest.mark.usefixtures("masks_are_kept")


@pytest.mark.parametrize(
    "make",
    [
        lambda: masks.dense(100, 70, block=16),
        lambda: masks.causal(100, block=(16, 32)),
        lambda: masks.local(100, window=9, causal=True),
        lambda: masks.butterfly(256, block=16),
        lambda: masks.bigbird(256, random_blocks=1, seed=3, block=16),
        lambda: masks.neighborhood((8, 8), window=(3, 5), block=16),
        lambda: masks.strided(100, stride=10, attend="strided", block=16),
    ],
)
def test_the_same_arguments_give_the_same_mask_until_the_caches_are_cleared(make):
    mask = make()
    assert make() is mask
    clear_caches()
    assert make() is not mask and make() == mask


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12), st.booleans()), min_size=2, max_size=6))
def test_a_kept_mask_is_that_of_its_arguments(calls):
    for tokens, window, causal in calls:
        mask = masks.local(tokens, window=window, causal=causal, block=16)
        far = torch.arange(tokens)[:, None] - torch.arange(tokens)
        live = (far >= 0) & (far < window) if causal else far.abs() <= window // 2
        assert torch.equal(mask.to_dense()[0, 0], live)


@pytest.mark.parametrize("value", [1.0, True, np.float64(1), "1"])
def test_what_is_equal_but_refused_is_refused_after_an_equal_call(value):
    masks.local(20, window=1, block=16)
    with pytest.raises(TypeError, match="window must be an integer number of keys"):
        masks.local(20, window=value, block=16)
    with pytest.raises(TypeError, match="causal must be True or False"):
        masks.local(20, window=1, causal=1, block=16)


def test_equal_arguments_of_other_names_or_functions_are_others():
    assert masks.causal(20, 30, block=16) is not masks.dense(20, 30, block=16)
    first, second = masks.local(64, left=3, right=9, block=16), masks.local(64, right=3, left=9, block=16)
    assert first != second


def test_lists_arrays_and_masks_are_read_at_every_call():
    lengths = [30, 34]
    mask = masks.documents(lengths, block=16)
    lengths[:] = 20, 44
    assert masks.documents(lengths, block=16) == masks.documents([20, 44], block=16) != mask
    numbers = np.array([0, 1])
    first = masks.longformer(64, window=3, global_tokens=numbers, block=16)
    numbers[1] = 50
    assert masks.longformer(64, window=3, global_tokens=numbers, block=16) != first


def test_large_masks_are_not_kept():
    assert masks.butterfly(1 << 17, block=16).nbytes > SMALL_MASK
    assert not signatures._kept


def test_few_masks_are_kept():
    for tokens in range(1, 3 * signatures._kept.most):
        masks.causal(tokens, block=16)
        assert 0 < len(signatures._kept) <= signatures._kept.most


def test_a_mask_first_made_in_inference_mode_may_be_used_in_training():
    with torch.inference_mode():
        masks.causal(40, block=16)
    mask = masks.causal(40, block=16)
    assert not any(x.is_inference() for x in mask._arrays() if x is not None)
    q = torch.randn(1, 1, 40, 16, requires_grad=True)
    attention(q, q, q, mask).sum().backward()


def test_masks_of_fake_tensors_and_of_compiled_code_are_not_kept():
    with FakeTensorMode(allow_non_fake_inputs=True):
        masks.causal(40, block=16)
    torch.compile(lambda x: x + masks.causal(40, block=16).indptr.sum(), backend="eager")(torch.ones(1))
    assert not signatures._kept


class Marked(torch.Tensor):
    pass


class Marking(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        return made.as_subclass(Marked) if isinstance(made, torch.Tensor) else made


def test_masks_of_tensors_of_another_class_are_not_kept():
    with Marking():
        mask = masks.causal(40, block=16)
    assert any(isinstance(x, Marked) for x in mask._arrays())
    assert not signatures._kept


def test_compiled_code_does_not_mark_a_kept_mask_as_its_constant():
    kept = masks.causal(40)
    # As while torch.compile of PyTorch 2.11 traces, where `is_compiling()` is False.
    name = compiling._build(None, lambda: masks.causal(40), [], {})
    assert getattr(compiling._kept, name)._is_constant
    assert masks.causal(40) is kept and not hasattr(kept, "_is_constant")


def test_the_signature_of_a_pattern_is_read_once():
    for pattern in (masks.causal, masks.documents, masks.butterfly):
        assert inspect.signature(pattern) is inspect.signature(pattern)
        assert inspect.signature(pattern) == inspect.signature(inspect.unwrap(pattern))
