import math

import pytest
import torch

from sparseflash import masks
from tests.masks.chosen_blocks import BUILD, SCORES

INDICES = torch.zeros(64, 2, dtype=torch.int64)


@pytest.mark.parametrize("build", BUILD.values(), ids=BUILD)
@pytest.mark.parametrize(
    ("scores", "changes", "error", "message"),
    [
        ([[0.0]], {}, TypeError, r"scores must be a tensor; got list"),
        (SCORES.int(), {}, TypeError, r"scores must have a floating dtype; got torch\.int32"),
        (SCORES[0], {}, ValueError, r"scores must have shape \[Mq, Mk\], \[H, Mq, Mk\] or .*; got \[4\]"),
        (SCORES[:0], {}, ValueError, r"scores must have shape .*, none of them 0; got \[0, 4\]"),
        (SCORES[:3], {}, ValueError, r"scores must have 4 x 4 blocks of 16 x 16 .*; got 3 x 4"),
        (SCORES, {"k_len": 80}, ValueError, r"scores must have 4 x 5 blocks of 16 x 16 .*; got 4 x 4"),
        (SCORES, {"block": 17}, ValueError, r"block must be one of"),
        (SCORES, {"q_len": 0}, ValueError, r"q_len must be between 1"),
        (SCORES, {"sink_blocks": -1}, ValueError, r"sink_blocks must be at least 0 blocks; got -1"),
        (SCORES, {"local_blocks": 1.0}, TypeError, r"local_blocks must be an integer number of blocks; got 1\.0"),
        (SCORES, {"group": 0}, ValueError, r"group must be at least 1 query head; got 0"),
    ],
)
def test_choices_of_blocks_say_what_they_refuse(build, scores, changes, error, message):
    with pytest.raises(error, match=message):
        build(scores, **({"q_len": 64, "block": 16} | changes))


@pytest.mark.parametrize(("k", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (None, TypeError)])
def test_k_must_be_a_number_of_blocks(k, error):
    with pytest.raises(error, match=rf"k must be (at least 1 block|an integer number of blocks); got {k}"):
        masks.top_k_blocks(SCORES, k=k, q_len=64, block=16)


def test_k_must_hold_the_blocks_that_are_always_kept():
    message = r"must be at least the 3 blocks that sink_blocks and local_blocks keep in some row; got 2"
    always = {"q_len": 64, "block": 16, "causal": True, "sink_blocks": 1, "local_blocks": 2}
    with pytest.raises(ValueError, match=f"k {message}"):
        masks.top_k_blocks(SCORES, k=2, **always)
    with pytest.raises(ValueError, match=f"most {message}"):
        masks.mass_blocks(SCORES, mass=0.5, most=2, **always)
    masks.top_k_blocks(SCORES, k=3, **always).validate()


@pytest.mark.parametrize("mass", [0, -0.5, 1.01, math.nan])
def test_mass_must_be_a_share(mass):
    with pytest.raises(ValueError, match=rf"mass must be above 0 and at most 1; got {mass}"):
        masks.mass_blocks(SCORES, mass=mass, q_len=64, block=16)


@pytest.mark.parametrize("mass", ["0.5", None, True])
def test_mass_must_be_a_number(mass):
    with pytest.raises(TypeError, match="mass must be a number; got"):
        masks.mass_blocks(SCORES, mass=mass, q_len=64, block=16)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: masks.selected_keys(INDICES.float(), k_len=64), TypeError, r"indices must have an integer dtype"),
        (lambda: masks.selected_keys(INDICES > 0, k_len=64), TypeError, r"an integer dtype; got torch\.bool"),
        (lambda: masks.selected_keys(INDICES[0], k_len=64), ValueError, r"indices must have shape .*; got \[2\]"),
        (lambda: masks.selected_keys(INDICES, k_len=0), ValueError, r"k_len must be between 1"),
        (lambda: masks.selected_keys(INDICES, k_len=64, span=3), ValueError, r"span must be a power of two; got 3"),
        (lambda: masks.selected_keys(INDICES, k_len=64, span=0), ValueError, r"span must be at least 1 key; got 0"),
        (lambda: masks.selected_keys(INDICES, k_len=64, most=0), ValueError, r"most must be at least 1 tile; got 0"),
        (lambda: masks.selected_keys(INDICES, k_len=64, group=0), ValueError, r"group must be at least 1 query head"),
        (lambda: masks.top_k_keys(SCORES, k=0, k_len=4), ValueError, r"k must be at least 1 key; got 0"),
        (lambda: masks.top_k_keys(SCORES, k=1, k_len=5), ValueError, r"scores must have 5 columns for 5 keys .*got 4"),
        (lambda: masks.top_k_keys(SCORES.long(), k=1, k_len=4), TypeError, r"scores must have a floating dtype"),
        (lambda: masks.pooled_scores(SCORES, SCORES), ValueError, r"q must be a floating tensor .*; got .* \[4, 4\]"),
        (lambda: masks.pooled_scores(torch.zeros(1, 1, 2, 3), None), ValueError, r"k must be .*; got NoneType"),
        (lambda: masks.antidiagonal_scores(SCORES, SCORES), ValueError, r"q must be a floating tensor .* \[4, 4\]"),
        (
            lambda: masks.antidiagonal_scores(*torch.zeros(2, 1, 1, 8, 4), block=32, stride=12),
            ValueError,
            "stride must divide the block; got 12 and 32",
        ),
        (
            lambda: masks.antidiagonal_scores(*torch.zeros(2, 1, 1, 8, 4), stride=0),
            ValueError,
            "stride must be at least 1 token; got 0",
        ),
        (
            lambda: masks.antidiagonal_scores(*torch.zeros(2, 1, 1, 8, 4), causal="yes"),
            TypeError,
            "causal must be True or False; got 'yes'",
        ),
        (
            lambda: masks.pooled_scores(torch.zeros(1, 3, 8, 4), torch.zeros(1, 2, 8, 4)),
            ValueError,
            r"q and k must have one batch size.*; got \[1, 3, 8, 4\] and \[1, 2, 8, 4\]",
        ),
        (
            lambda: masks.pooled_scores(*torch.zeros(2, 1, 3, 8, 4), lengths=torch.tensor([1, 2])),
            ValueError,
            r"lengths must have shape \[1\]; got \[2\]",
        ),
    ],
)  # fmt: skip
def test_the_others_say_what_they_refuse(call, error, message):
    with pytest.raises(error, match=message):
        call()
