import copy
import pickle
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from sparseflash import masks
from sparseflash.blockmask.remedies import ATTRIBUTES

MASK = masks.causal(64, block=32)
MOVE = r"move a mask with mask.to\('cuda'\) or mask.to\('cpu'\)"


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_of_tensors_are_answered_with_what_to_do(name):
    assert not hasattr(MASK, name)
    with pytest.raises(AttributeError, match=f"^BlockMask has no attribute '{name}': .+[.]$"):
        getattr(MASK, name)


def test_a_mask_says_how_it_is_moved():
    for name in ("cuda", "cpu"):
        with pytest.raises(AttributeError, match=f"BlockMask has no attribute '{name}': {MOVE}"):
            getattr(MASK, name)()
    with pytest.raises(AttributeError, match=r"^BlockMask has no attribute 'nonsense'$"):
        _ = MASK.nonsense
    assert not hasattr(MASK, "__wrapped__") and getattr(MASK, "pin_memory", None) is None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            lambda: MASK[0:10],
            r"must not be indexed, sliced or iterated over: take a part with mask.crop\(q=\(start, stop\), k=",
        ),
        (lambda: MASK[0, 0], r"must not be indexed, sliced or iterated over: take a part with mask.crop"),
        (lambda: len(MASK), r"must not be passed to len\(\): mask.shape is \(B, H, Nq, Nk\)"),
        (lambda: list(MASK), r"must not be indexed, sliced or iterated over: take a part with mask.crop"),
        (lambda: np.array(MASK), r"must not be converted to an array: mask.to_dense\(\) is the boolean tensor"),
        (lambda: np.asarray(MASK, dtype=bool), r"must not be converted to an array: mask.to_dense\(\)"),
        (lambda: np.concatenate([MASK, MASK]), r"must not be converted to an array: mask.to_dense\(\)"),
    ],
)
def test_what_is_done_with_sequences_is_answered_with_what_to_do(asked, said):
    with pytest.raises(TypeError, match=f"a BlockMask {said}"):
        asked()


@pytest.mark.parametrize("other", [torch.ones(64, 64, dtype=torch.bool), np.ones((64, 64), bool), 1])
def test_a_tensor_is_no_mask_on_either_side(other):
    for combined in (lambda a, b: a & b, lambda a, b: a | b, lambda a, b: a ^ b):
        for pair in ((MASK, other), (other, MASK)):
            with pytest.raises(TypeError, match=r"mask must be a sparseflash BlockMask; got .*BlockMask.from_dense"):
                combined(*pair)


def test_one_mask_is_not_taken_for_several():
    assert not isinstance(MASK, Iterable)


def test_numpy_makes_nothing_of_a_mask():
    for function in (np.sum, np.logical_not, lambda mask: np.add(mask, 1)):
        with pytest.raises(TypeError):
            function(MASK)


def test_masks_are_copied_and_pickled_as_before():
    assert pickle.loads(pickle.dumps(MASK)) == MASK and copy.deepcopy(MASK) is MASK is copy.copy(MASK)


def test_names_of_other_libraries_are_answered_with_ours():
    with pytest.raises(AttributeError, match=r"has no 'sliding_window'; use masks.local\(n, window=w"):
        masks.sliding_window(64, 16)
    with pytest.raises(AttributeError, match=r"has no 'causal_mask'; use masks.causal\(n\)\."):
        _ = masks.causal_mask
    with pytest.raises(AttributeError, match=r"has no 'buterfly'; did you mean butterfly"):
        _ = masks.buterfly
    with pytest.raises(AttributeError, match=r"has no 'xyz'; it has a_shape, .*with_text\."):
        _ = masks.xyz
    with pytest.raises(ImportError, match="cannot import name 'sliding_window'"):
        from sparseflash.masks import sliding_window  # noqa: F401
    assert not hasattr(masks, "__wrapped__")


def test_every_remedy_for_a_name_names_what_there_is():
    import re

    from sparseflash.masks.other_names import OTHER_NAMES

    assert not set(OTHER_NAMES) & set(masks.__all__)
    for remedy in OTHER_NAMES.values():
        for name in re.findall(r"masks\.(\w+)\(", remedy):
            assert name in masks.__all__


def test_numpy_knows_the_size_of_a_mask():
    mask = masks.per_head([masks.causal(100, 60), masks.local(100, window=3).crop(k=(0, 60))])
    assert (np.shape(mask), np.ndim(mask)) == (mask.shape, 4)
    assert np.size(mask) == np.size(a=mask) == mask.to_dense().numel() == 2 * 100 * 60
    assert np.size(mask, axis=1) == 2
