"""What is no mask, or no answer to yes or no, is refused by every function, in one way."""

import inspect
import re

import pytest
import torch

from sparseflash import BlockMask, analysis, draw, interop, masks

DENSE = torch.ones(32, 32, dtype=torch.bool)
OF_A_MASK = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (analysis, draw, interop)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name)) and not name.startswith("from_")
}
OF_LAYERS = ("lint", "reach", "layers_to_full_reach", "diameter")


def called(function, value):
    needed = {"head_dim": 64} if "head_dim" in inspect.signature(function).parameters else {}
    return function(value, **needed)


def test_the_functions_are_found():
    assert {"sparseflash.analysis.density", "sparseflash.draw.plot", "sparseflash.interop.to_flex"} <= OF_A_MASK.keys()
    assert len(OF_A_MASK) == 9 + 6 + 8


@pytest.mark.parametrize("value", [3, None, DENSE, "mask"], ids=["int", "None", "tensor", "str"])
@pytest.mark.parametrize("name", OF_A_MASK)
def test_what_is_no_mask_is_refused(name, value):
    function = OF_A_MASK[name]
    message = f"mask must be a BlockMask; got {type(value).__name__} (BlockMask.from_dense takes boolean tensors)."
    if function.__name__ in OF_LAYERS:
        message = "masks must be a BlockMask or a sequence of one or more; got "
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        called(function, value)


@pytest.mark.parametrize("name", [name for name in OF_A_MASK if OF_A_MASK[name].__name__ in OF_LAYERS])
@pytest.mark.parametrize("value", [[], [3], [BlockMask.dense(32), None]], ids=["none", "int", "one and None"])
def test_lists_of_other_than_masks_are_refused(name, value):
    with pytest.raises(TypeError, match="masks must be a BlockMask or a sequence of one or more; got "):
        OF_A_MASK[name](value)


@pytest.mark.parametrize("stack", [masks.per_head, masks.per_batch])
def test_stacking_refuses_what_is_no_list(stack):
    with pytest.raises(TypeError, match="masks must be a list of BlockMasks; got int"):
        stack(3)


@pytest.mark.parametrize("value", [BlockMask.dense(32), 3], ids=["ours", "int"])
def test_from_flex_refuses_other_masks(value):
    with pytest.raises(TypeError, match=r"block_mask must be FlexAttention's BlockMask; got (sparseflash|builtins)\."):
        interop.from_flex(value)


@pytest.mark.parametrize("value", ["yes", "no", 1, None])
def test_causal_is_true_or_false(value):
    mask = masks.causal(32, block=16)
    for function in (analysis.lint, analysis.layers_to_full_reach):
        with pytest.raises(TypeError, match=f"causal must be True or False; got {value!r}"):
            function(mask, causal=value)


@pytest.mark.parametrize("value", [128, None, "64"])
def test_coarsening_takes_a_list_of_blocks(value):
    with pytest.raises(TypeError, match=f"blocks must be a list of blocks; got {value!r}"):
        analysis.coarsening(masks.causal(64), value)


def test_orders_to_lint_are_named():
    with pytest.raises(TypeError, match="orders must be a dict from names to orders of the tokens; got list"):
        analysis.lint(masks.causal(64), orders=[torch.arange(64)])
