import dataclasses
import math
import re

import numpy as np
import pytest
import torch

from sparseflash import BlockMask, masks
from tests.blockmask.mask_values import ARRAYS, assert_same, int32, two_patterns, window


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_must_be_int32_tensors(name):
    mask = window().with_lengths(torch.tensor([40]))
    for wrong in (torch.int64, torch.int16, torch.float32):
        with pytest.raises(TypeError, match=f"^{name} must be an int32 tensor; got {wrong}"):
            dataclasses.replace(mask, **{name: getattr(mask, name).to(wrong)})
    with pytest.raises(TypeError, match=f"^{name} must be an int32 tensor; got list"):
        dataclasses.replace(mask, **{name: getattr(mask, name).tolist()})


@pytest.mark.parametrize("name", ["indptr", "tile", "bits", "pattern", "lengths"])
def test_arrays_must_be_on_one_device(name):
    mask = window().with_lengths(torch.tensor([40]))
    with pytest.raises(ValueError, match=f"one device; {name} is on meta, indices are on cpu"):
        dataclasses.replace(mask, **{name: getattr(mask, name).to("meta")})


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_must_be_contiguous(name):
    mask = two_patterns().with_lengths(torch.tensor([40, 30]))
    array = getattr(mask, name)
    strided = torch.stack([array, array], -1)[..., 0]
    with pytest.raises(ValueError, match=rf"^{name} must be contiguous; call \.contiguous\(\) on it"):
        dataclasses.replace(mask, **{name: strided})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indptr": int32([0, 2, 5])}, r"indptr must have P \* 3 \+ 1 entries \(3 block rows .*\); got shape \[3\]"),
        ({"indptr": int32([0, 2, 5, 7, 7])}, r"indptr must have P \* 3 \+ 1 entries"),
        ({"indptr": int32([0])}, r"indptr must have P \* 3 \+ 1 entries"),
        ({"indptr": int32([])}, r"indptr must have P \* 3 \+ 1 entries"),
        ({"indptr": int32([[0, 2, 5, 7]])}, r"indptr must have P \* 3 \+ 1 entries"),
        ({"tile": int32([0] * 6)}, r"indices and tile must have one shape \[nnz\]; got \[7\] and \[6\]"),
        (
            {"tile": int32([[0]]), "indices": int32([[0]])},
            r"indices and tile must have one shape \[nnz\]; got \[1, 1\] and \[1, 1\]",
        ),
        ({"bits": int32([[[0]]])}, r"bits must have shape \[T, 16, 1\]; got \[1, 1, 1\]"),
        ({"bits": int32([0] * 64)}, r"bits must have shape \[T, 16, 1\]; got \[64\]"),
        ({"block_k": 64}, r"bits must have shape \[T, 16, 2\]; got \[4, 16, 1\]"),
        ({"pattern": int32([0])}, r"pattern must have shape \[B or 1, Hq or 1\]; got \[1\]"),
        ({"pattern": int32([[]])}, r"pattern must have shape \[B or 1, Hq or 1\]; got \[1, 0\]"),
        ({"lengths": int32([40])}, r"lengths must have shape \[2, B\] with the pattern's B; got \[1\]"),
        (
            {"lengths": int32([[40] * 3] * 2), "pattern": int32([[0], [0]])},
            r"lengths must have shape \[2, B\] with the pattern's B; got \[2, 3\]",
        ),
        ({"block_q": 17}, r"block must be one of 16, 32, 64, 128, 256, or a tuple of two of them; got \(17, 16\)"),
        ({"q_len": 0}, r"q_len must be between 1 and 2\^31 - 257 tokens; got 0"),
        ({"k_len": 2**31}, r"k_len must be between 1 and 2\^31 - 257 tokens; got 2147483648"),
    ],
    ids=str,
)
def test_arrays_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(window(), **changes)


ZERO = torch.tensor([0])
YES = torch.ones(4, 4, dtype=torch.bool)

BLOCK_TAKERS = {
    "from_dense": lambda block: BlockMask.from_dense(YES, block=block),
    "from_layout": lambda block: BlockMask.from_layout(YES, block=block),
    "from_function": lambda block: BlockMask.from_function(lambda q, k: k <= q, 4, block=block),
    "from_tiles": lambda block: BlockMask.from_tiles(ZERO, ZERO, 4, block=block),
    "dense": lambda block: BlockMask.dense(4, block=block),
}
LENGTH_TAKERS = {
    "from_layout": lambda **lengths: BlockMask.from_layout(YES, **lengths),
    "from_function": lambda **lengths: BlockMask.from_function(lambda q, k: k <= q, **lengths),
    "from_tiles": lambda **lengths: BlockMask.from_tiles(ZERO, ZERO, **lengths),
    "dense": BlockMask.dense,
}


META, NUMBERS = YES.to("meta"), ZERO.to("meta")
SPARSE = torch.ones(1, dtype=torch.int64).to_sparse()
FULL = torch.ones(1, 16, 16, dtype=torch.bool)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: BlockMask.from_dense(META), "dense"),
        (lambda: BlockMask.from_layout(META), "layout"),
        (lambda: BlockMask.from_tiles(NUMBERS, ZERO, 64), "rows"),
        (lambda: BlockMask.from_tiles([0], NUMBERS, 64), "cols"),
        (lambda: BlockMask.from_tiles(ZERO, ZERO, 64, block=16, tile=NUMBERS, live=FULL), "tile"),
        (lambda: BlockMask.from_tiles(ZERO, ZERO, 64, block=16, live=FULL.to("meta")), "live"),
        (lambda: BlockMask.from_function(lambda q, k: (k <= q).to("meta"), 64), "what live returns"),
        (lambda: BlockMask.from_function(lambda q, k: k <= q, 64, block=16, candidates=META), "candidates"),
        (lambda: BlockMask.from_function(lambda q, k: k <= q, 64, candidates=(NUMBERS, ZERO)), "rows"),
        (lambda: BlockMask.from_function(lambda q, k: k <= q, 64, candidates=lambda i, j: META), "what candidates ret"),
        (lambda: BlockMask.from_function(lambda q, k: k <= q, 64, device="meta"), "device"),
        (lambda: BlockMask.dense(4).permute(torch.arange(4, device="meta")), "order"),
        (lambda: BlockMask.dense(4).permute(q=torch.arange(4, device="meta")), "q"),
        (lambda: masks.order.inverse(torch.arange(4, device="meta")), "order"),
        (lambda: BlockMask.dense(4).select(heads=NUMBERS), "heads"),
    ],
)
def test_tensors_without_contents_are_refused(build, name):
    with pytest.raises(ValueError, match=f"^{name}.* must .*contents.*; got the meta device, which has none"):
        build()


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: BlockMask.from_tiles(SPARSE, ZERO, 64), "rows"),
        (lambda: BlockMask.from_tiles(ZERO, ZERO, 64, block=16, tile=SPARSE, live=FULL), "tile"),
        (lambda: BlockMask.dense(1).permute(SPARSE), "order"),
        (lambda: BlockMask.dense(4).with_lengths(SPARSE), "lengths"),
        (lambda: BlockMask.dense(4).with_lengths(SPARSE.int()), "lengths"),
    ],
)
def test_sparse_tensors_are_refused(build, name):
    with pytest.raises(TypeError, match=f"^{name} must be a dense tensor; got one with the layout torch.sparse_coo"):
        build()


@pytest.mark.parametrize("device", [3, 1.5, "no"])
def test_devices_that_are_none_are_refused(device):
    with pytest.raises((TypeError, ValueError), match=r"device must be a torch\.device or its name"):
        BlockMask.from_function(lambda q, k: k <= q, 64, device=device)


@pytest.mark.parametrize("build", BLOCK_TAKERS.values(), ids=BLOCK_TAKERS)
@pytest.mark.parametrize(
    "block", [0, -16, 8, 100, 512, None, "16", 64.0, [32, 32], (16,), (16, 32, 64), (16, 17)], ids=repr
)
def test_a_block_that_is_none_is_refused(build, block):
    message = f"block must be one of 16, 32, 64, 128, 256, or a tuple of two of them; got {block!r}."
    with pytest.raises(ValueError, match=re.escape(message)):
        build(block)


@pytest.mark.parametrize("build", LENGTH_TAKERS.values(), ids=LENGTH_TAKERS)
@pytest.mark.parametrize("name", ["q_len", "k_len"])
def test_lengths_that_are_none_are_refused(build, name):
    for wrong in (0, -1, 2**31 - 256, 2**40):
        with pytest.raises(ValueError, match=rf"{name} must be between 1 and 2\^31 - 257 tokens; got {wrong}"):
            build(**{"q_len": 512, "k_len": 512, name: wrong})
    for wrong in (True, 1.5, 64.0, "64", math.nan):
        message = f"{name} must be an integer number of tokens; got {wrong!r}"
        with pytest.raises(TypeError, match=re.escape(message)):
            build(**{"q_len": 512, "k_len": 512, name: wrong})


def test_lengths_may_be_integers_of_numpy_and_torch():
    assert_same(BlockMask.dense(np.int32(70), torch.tensor(50), block=32), BlockMask.dense(70, 50, block=32))


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda: BlockMask.from_dense(torch.ones(4, 4)),
            TypeError,
            r"dense must be boolean .* got torch\.float32\. Compare it: x != 0 if .*, x == 0 if .* -inf is dead",
        ),
        (lambda: BlockMask.from_dense(np.eye(4, dtype=np.uint8)), TypeError, r"dense must be boolean .* torch\.uint8"),
        (lambda: BlockMask.from_dense(YES[0]), ValueError, r"dense must have shape \[Nq, Nk\], .* got \[4\]"),
        (
            lambda: BlockMask.from_dense(YES[None, None, None]),
            ValueError,
            r"dense must have shape .* got \[1, 1, 1, 4, 4\]",
        ),
        (lambda: BlockMask.from_dense(YES[:0]), ValueError, r"q_len must be between 1 and .* got 0"),
        (lambda: BlockMask.from_dense(YES[:, :0]), ValueError, r"k_len must be between 1 and .* got 0"),
        (
            lambda: BlockMask.from_dense(YES.expand(0, 4, 4)),
            ValueError,
            r"dense must have at least one batch element and head; got \[1, 0, 4, 4\]",
        ),
        (lambda: BlockMask.from_layout(torch.ones(4, 4)), TypeError, r"layout must be boolean .* got torch\.float32"),
        (lambda: BlockMask.from_layout(YES[0]), ValueError, r"layout must have shape \[Mq, Mk\], .* got \[4\]"),
        (
            lambda: BlockMask.from_layout(YES.expand(0, 1, 4, 4)),
            ValueError,
            r"layout must have at least one batch element and head; got \[0, 1, 4, 4\]",
        ),
        (lambda: BlockMask.from_layout(YES[:0]), ValueError, r"q_len must be between 1 and .* got 0"),
        (
            lambda: BlockMask.from_layout(YES, block=16, q_len=48),
            ValueError,
            r"layout must have 3 x 4 blocks of 16 x 16 for 48 queries and 64 keys; got 4 x 4",
        ),
        (
            lambda: BlockMask.from_layout(YES, block=(16, 32), k_len=129),
            ValueError,
            r"layout must have 4 x 5 blocks of 16 x 32 for 64 queries and 129 keys; got 4 x 4",
        ),
        (
            lambda: BlockMask.from_function(lambda q, k: q - k, 40),
            TypeError,
            r"what live returns must be boolean \(True: live\); got torch\.int64",
        ),
        (
            lambda: BlockMask.from_function(lambda q, k: k <= q, 40, block=16, candidates=YES),
            ValueError,
            r"candidates must have 3 x 3 blocks of 16 x 16 for 40 queries and 40 keys; got 4 x 4",
        ),
        (
            lambda: BlockMask.from_function(lambda q, k: k <= q, 64, block=16, candidates=YES[None]),
            ValueError,
            r"candidates must have shape \[Mq, Mk\]; got \[1, 4, 4\]",
        ),
        (
            lambda: BlockMask.from_function(lambda q, k: k <= q, 64, block=16, candidates=YES.int()),
            TypeError,
            r"candidates must be boolean \(True: live\); got torch\.int32",
        ),
        (
            lambda: BlockMask.from_function(lambda q, k: k <= q, 64, candidates=lambda i, j: i + j),
            TypeError,
            r"what candidates returns must be boolean \(True: live\); got torch\.int64",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO, torch.tensor([0, 1]), 64, block=16),
            ValueError,
            r"rows and cols must have one shape \[E\]; got \[1\] and \[2\]",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO, ZERO, 64, block=16, tile=torch.tensor([0, 0])),
            ValueError,
            r"rows and tile must have one shape \[E\]; got \[1\] and \[2\]",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO[0], ZERO[0], 64, block=16),
            ValueError,
            r"rows and cols must have one shape \[E\]; got \[\] and \[\]",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO, ZERO, 64, block=16, live=YES[None]),
            ValueError,
            r"live must have shape \[T, 16, 16\]; got \[1, 4, 4\]",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO, ZERO, 64, block=16, live=torch.ones(1, 16, 16)),
            TypeError,
            r"live must be boolean \(True: live\); got torch\.float32",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO, ZERO, 64, block=16, live=torch.ones(2, 16, 16, dtype=torch.bool)),
            ValueError,
            r"live must have one entry per tile, 1, unless tile is given to assign them; got 2",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO, ZERO, 64, block=16, tile=torch.tensor([0.5])),
            TypeError,
            r"tile must be an integer tensor; got torch\.float32",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO, ZERO, 64, block=16, tile=[0.5]),
            TypeError,
            r"tile must be a list of integers; got torch\.float32",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO, [0.5], 64, block=16),
            TypeError,
            r"cols must be a list of integers; got torch\.float32",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO + 4, ZERO, 64, block=16),
            ValueError,
            r"rows must lie in 0\.\.3; got 4\.\.4",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO, ZERO - 1, 64, block=16),
            ValueError,
            r"cols must lie in 0\.\.3; got -1\.\.-1",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO, ZERO, 64, block=16, tile=ZERO + 1),
            ValueError,
            r"tile must lie in 0\.\.0; got 1\.\.1",
        ),
        (
            lambda: BlockMask.from_tiles(torch.tensor([0, 1, 0]), torch.tensor([2, 0, 2]), 64, block=16),
            ValueError,
            r"a tile must not be listed twice",
        ),
        (
            lambda: BlockMask.from_tiles(ZERO.float(), ZERO, 64, block=16),
            TypeError,
            r"rows must be an integer tensor; got torch\.float32",
        ),
        (
            lambda: BlockMask.from_function(lambda q, k: k <= q, 64, block=16, candidates=(ZERO, ZERO + 4)),
            ValueError,
            r"cols must lie in 0\.\.3; got 4\.\.4",
        ),
        (
            lambda: BlockMask.from_function(lambda q, k: k <= q, 64, block=16, candidates=(ZERO[[0, 0]], ZERO[[0, 0]])),
            ValueError,
            r"a tile must not be listed twice",
        ),
    ],
)
def test_constructors_say_what_they_refuse(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_one_tile_is_not_called_tiles():
    assert repr(BlockMask.dense(64, block=64)) == (
        "BlockMask(64 x 64, blocks of 64, 1 tile: 1 full + 0 partial, density 100 %)"
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda rule: BlockMask.from_function(rule, 1, 2, 64, 64),
        lambda rule: BlockMask.from_function(rule, None, None, 64, 64, "cpu"),
        lambda rule: BlockMask.from_function(rule, B=1, H=2, Q_LEN=64, KV_LEN=64),
        lambda rule: BlockMask.from_function(mask_mod=rule, q_len=64),
    ],
)
def test_the_arguments_of_flex_attentions_create_block_mask_are_translated(call):
    remedy = "is from_function(mask_mod, Q_LEN, KV_LEN, batch=B, heads=H), with 1 in place of None"
    with pytest.raises(TypeError, match=f"^from_function must be given live, q_len and k_len .*{re.escape(remedy)}"):
        call(lambda b, h, q, k: k <= q)


@pytest.mark.parametrize("name", ["block_size", "BLOCK_SIZE"])
def test_the_size_of_a_tile_is_called_block(name):
    square = torch.ones(64, 64, dtype=torch.bool)
    for build, given in (
        (BlockMask.from_function, (lambda q, k: k <= q, 64)),
        (BlockMask.from_dense, (square,)),
        (BlockMask.from_layout, (square,)),
        (BlockMask.from_tiles, ([0], [0], 64)),
        (BlockMask.from_block_index, (torch.zeros(4, 1, dtype=torch.int64),)),
        (BlockMask.dense, (64,)),
    ):
        with pytest.raises(TypeError, match=rf"^{build.__name__} must .*; got {name}=\. The size of a tile is called"):
            build(*given, **{name: 16})
