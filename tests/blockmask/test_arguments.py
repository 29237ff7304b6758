import inspect
import re

import numpy as np
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


@pytest.mark.parametrize("value", [torch.tensor([1, 2]), torch.tensor([[3]]).numpy()])
def test_several_numbers_are_not_taken_for_one(value):
    with pytest.raises(TypeError, match=r"^prefix must be one integer number of tokens; got a .* of shape .*per_batch"):
        masks.prefix_lm(32, prefix=value)
    assert masks.prefix_lm(32, prefix=torch.tensor(3)) == masks.prefix_lm(32, prefix=3)


def test_the_functions_are_found():
    assert {"sparseflash.analysis.density", "sparseflash.draw.plot", "sparseflash.interop.to_flex"} <= OF_A_MASK.keys()
    assert len(OF_A_MASK) == 9 + 6 + 8


@pytest.mark.parametrize("value", [3, None, DENSE, "mask"], ids=["int", "None", "tensor", "str"])
@pytest.mark.parametrize("name", OF_A_MASK)
def test_what_is_no_mask_is_refused(name, value):
    function = OF_A_MASK[name]
    kind = "torch.Tensor" if value is DENSE else type(value).__name__
    message = f"mask must be a sparseflash BlockMask; got {kind} (BlockMask.from_dense takes boolean"
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


@pytest.mark.parametrize(
    "build",
    [
        lambda **causal: masks.local(64, window=3, **causal),
        lambda **causal: masks.dilated(64, window=3, dilation=2, **causal),
        lambda **causal: masks.butterfly(64, block=16, **causal),
        lambda **causal: masks.documents([64], **causal),
        lambda **causal: masks.chunked(64, chunk=8, **causal),
        lambda **causal: masks.longformer(64, window=3, global_tokens=1, **causal),
        lambda **causal: masks.random_blocks(64, count=1, block=16, **causal),
        lambda **causal: masks.deepspeed_bigbird(64, block=16, **causal),
        lambda **causal: masks.deepspeed_fixed(64, block=16, **causal),
        lambda **causal: masks.hierarchical(64, block=16, **causal),
        lambda **causal: masks.top_k_blocks(torch.zeros(4, 4), k=2, q_len=64, block=16, **causal),
        lambda **causal: masks.mass_blocks(torch.zeros(4, 4), mass=0.5, q_len=64, block=16, **causal),
        lambda **causal: masks.top_k_keys(torch.zeros(64, 64), k=2, k_len=64, **causal),
        lambda **causal: masks.selected_keys(torch.zeros(64, 2, dtype=torch.int64), k_len=64, **causal),
    ],
)
def test_patterns_are_causal_or_not(build):
    build(causal=True), build(causal=False)
    with pytest.raises(TypeError, match="causal must be True or False; got 'no'"):
        build(causal="no")


@pytest.mark.parametrize(
    ("live", "error", "message"),
    [
        (
            lambda b, h, q, k: k <= q,
            TypeError,
            r"batch or heads must be given .*from_function\(live, q_len, batch=1, heads=8\); got .* \(b, h, q, k\)",
        ),
        (lambda q: q, TypeError, r"two arguments, .* or four, .*; got a function of \(q\)"),
        (lambda b, q, k: q, TypeError, r"two arguments, .* or four, .*; got a function of \(b, q, k\)"),
        (DENSE, TypeError, r"live must be a function of positions \(q_idx, k_idx\); got Tensor"),
        (lambda q, k: (k <= q).expand(4), ValueError, r"one answer for single numbers; got shape \[4\]"),
        (lambda q, k: (k <= q)[None].expand(2, 3), ValueError, r"one answer for single numbers; got shape \[2, 3\]"),
    ],
)
def test_rules_that_are_none_say_why(live, error, message):
    with pytest.raises(error, match=message):
        BlockMask.from_function(live, 32, block=16)


def test_rules_may_be_of_any_kind_that_takes_two():
    assert BlockMask.from_function(torch.ge, 32, block=16) == masks.causal(32, block=16)
    assert BlockMask.from_function(lambda *at: at[1] <= at[0], 32, block=16) == masks.causal(32, block=16)


def test_a_mask_moves_to_devices_only():
    with pytest.raises(TypeError):
        masks.causal(32).to(torch.float16)


ARRAYS = {
    "in reverse": lambda *numbers: np.array(numbers[::-1])[::-1],
    "of the other byte order": lambda *numbers: np.array(numbers).astype(np.dtype(int).newbyteorder()),
    "read-only": lambda *numbers: np.frombuffer(np.array(numbers).tobytes(), dtype=int),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
@pytest.mark.parametrize(
    "build",
    [
        lambda of: masks.documents(of(3, 4), block=16),
        lambda of: masks.axial((2, 2), order=of(3, 1, 0, 2), block=16),
        lambda of: masks.vertical_slash(40, vertical=of(3, 4), slash=of(0, 5), block=16),
        lambda of: masks.per_head([masks.causal(9, offset=n, block=16) for n in range(5)]).select(heads=of(1, 3)),
        lambda of: masks.causal(40, block=16).with_lengths(of(30, 4)),
        lambda of: masks.causal(4, block=16).permute(of(1, 2, 0, 3)),
        lambda of: BlockMask.from_tiles(of(0, 2), of(1, 0), 40, block=16),
    ],
    ids=["documents", "order", "vertical_slash", "select", "with_lengths", "permute", "from_tiles"],
)
def test_arrays_of_integers_may_be_of_any_kind(build, array):
    assert build(array) == build(lambda *numbers: list(numbers))
