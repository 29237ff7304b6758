"""Loose masks: room, dead and equal tiles, equal patterns. They mean the same to everything as their canonical form."""

import dataclasses
import pickle
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_flatten

from sparseflash import BlockMask, analysis, attention, interop, masks, tiles
from sparseflash.csr import row_of_entry
from sparseflash.kernels.plan import plan_of
from strategies import SEEDS, Recipe, block_masks, problems
from test_exactness import check
from waiting import NoWaiting

MOST = 120


def loosen(mask, seed):
    """The same scores in arrays that are not canonical: patterns split and shuffled and one that no head uses, dead
    tiles added, bits repeated, full, dead, unused and shuffled, and room for more tiles."""
    rng = np.random.default_rng(seed)
    row_blocks, col_blocks = mask.blocks
    indptr, indices, tile = (x.numpy() for x in (mask.indptr, mask.indices, mask.tile))
    patterns = (len(indptr) - 1) // row_blocks

    words = mask.bits.numpy()
    whole = np.int32(tiles.full_word(mask.block_k))
    unused = rng.integers(-(2**31), 2**31, (2, *words.shape[1:]), dtype=np.int32) & whole
    pool = [np.zeros_like(unused[:1]), np.full_like(unused[:1], whole), words, words, words[: rng.integers(4)], unused]
    kinds = [-1, 0, *range(1, len(words) + 1), *range(1, len(words) + 1), *range(1, 1 + len(pool[4])), -2, -2]
    order = rng.permutation(len(kinds))
    bits, kinds = np.concatenate(pool)[order], np.array(kinds)[order]

    def number(kind):
        choices = [*(1 + np.flatnonzero(kinds == kind)), *([0] if kind == 0 else [])]
        return rng.choice(choices)

    source = rng.permutation([*range(patterns), *rng.integers(patterns, size=rng.integers(1, 4))])
    pattern = [rng.choice(np.flatnonzero(source == p)) for p in mask.pattern.numpy().reshape(-1)]
    starts, cols, numbers = [0], [], []
    for p in source:
        for row in range(p * row_blocks, (p + 1) * row_blocks):
            held = {j: number(t) for j, t in zip(*(x[indptr[row] : indptr[row + 1]] for x in (indices, tile)))}
            dead = [j for j in range(col_blocks) if j not in held and rng.random() < 0.3]
            held |= {j: number(-1) for j in dead}
            cols += sorted(held)
            numbers += [held[j] for j in sorted(held)]
            starts.append(len(cols))
    room = rng.integers(5)
    cols += [*rng.integers(col_blocks, size=room)]
    numbers += [*rng.integers(len(bits) + 1, size=room)]
    starts, cols, numbers, pattern = (
        torch.from_numpy(np.array(x, dtype=np.int32)) for x in (starts, cols, numbers, pattern)
    )
    return BlockMask(
        mask.q_len, mask.k_len, mask.block_q, mask.block_k, starts, cols, numbers, torch.from_numpy(bits.copy()),
        pattern.view(mask.pattern.shape), mask.lengths, loose=True,
    )  # fmt: skip


def drawn_masks():
    return block_masks(MOST, batch=2, heads=3)


def example(**changes):
    mask = loosen(masks.local(100, 30, block=16), seed=3)
    return dataclasses.replace(mask, **{name: change(mask) for name, change in changes.items()})


# ---------------------------------------------------------------------- the mask


@given(drawn_masks(), SEEDS)
def test_a_loose_mask_is_the_mask_that_it_was_made_from(mask, seed):
    loose = loosen(mask, seed)
    assert loose.validate() is loose
    canonical = loose.canonical()
    assert not canonical.loose and canonical.canonical() is canonical
    canonical.validate()
    for name in ("indptr", "indices", "tile", "bits", "pattern"):
        assert torch.equal(getattr(canonical, name), getattr(mask, name)), name
    assert loose == mask and mask == loose and loose == loosen(mask, seed + 1)
    assert hash(loose) == hash(mask)
    assert torch.equal(loose.to_dense(), mask.to_dense())
    assert loose.density == mask.density
    assert loose.shape == mask.shape
    assert repr(loose) == f"{repr(mask)[:-1]}, loose)"
    back = pickle.loads(pickle.dumps(loose))
    assert back == mask and not back.loose


@given(drawn_masks(), drawn_masks(), SEEDS)
def test_loose_masks_differ_when_their_scores_do(mask, other, seed):
    assert (loosen(mask, seed) == loosen(other, seed)) == (mask == other)


def test_the_canonical_form_is_made_once_and_serves_masks_with_other_lengths():
    loose = example()
    assert loose.canonical() is loose.canonical()
    padded = loose.with_lengths(torch.tensor([7, 99]))
    assert padded.canonical().indices is loose.canonical().indices
    assert padded.canonical().lengths.tolist() == [7, 99]
    assert padded == masks.local(100, 30, block=16).with_lengths(torch.tensor([7, 99]))


def test_lengths_and_moving_keep_a_mask_loose():
    loose = example()
    padded = loose.with_lengths(torch.tensor([5]))
    assert padded.loose and padded.indices is loose.indices
    assert padded.to("meta").loose and loose.to("cpu") is loose
    assert not masks.causal(64).loose and not masks.causal(64).with_lengths(torch.tensor([5])).loose


def test_constructors_of_the_library_are_not_loose_and_pay_nothing():
    mask = masks.causal(64, block=16)
    assert mask.canonical() is mask


# ---------------------------------------------------------------------- what is derived from it


def test_entries_in_the_room_belong_to_the_row_past_the_last():
    indptr = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    assert row_of_entry(indptr, 5).tolist() == [0, 0, 2, 2, 2]
    assert row_of_entry(indptr, 8).tolist() == [0, 0, 2, 2, 2, 3, 3, 3]
    assert row_of_entry(torch.zeros(3, dtype=torch.int32), 2).tolist() == [2, 2]


def dense_of_lists(mask, starts, counts, index, tile, *, transposed):
    """Bool `[P, rows, cols]` of tokens, from lists of tiles of block rows, or of block columns if `transposed`."""
    (row_blocks, col_blocks), (block_q, block_k) = mask.blocks, (mask.block_q, mask.block_k)
    live = tiles.unpack(mask.bits, block_k)
    lines = col_blocks if transposed else row_blocks
    dense = torch.zeros(len(starts) // lines, row_blocks, col_blocks, block_q, block_k, dtype=torch.bool)
    for line, (start, count) in enumerate(zip(starts.tolist(), counts.tolist())):
        for e in range(start, start + count):
            at = (int(index[e]), line % lines) if transposed else (line % lines, int(index[e]))
            dense[(line // lines, *at)] = True if tile[e] == 0 else live[tile[e] - 1]
    return dense.transpose(2, 3).reshape(len(dense), row_blocks * block_q, -1)[:, : mask.q_len, : mask.k_len]


@given(block_masks(MOST, batch=2, heads=2), SEEDS)
def test_columns_hold_what_the_rows_hold(mask, seed):
    loose = loosen(mask, seed)
    indptr, indices, tile = loose.columns
    assert len(indices) == len(loose.indices) and indptr[-1] == loose.indptr[-1]
    assert ((indices >= 0) & (indices < mask.blocks[0])).all(), "in range, the room too"
    dense = dense_of_lists(loose, indptr[:-1], indptr.diff(), indices, tile, transposed=True)
    assert torch.equal(dense[loose.pattern.long()], replace(loose, lengths=None).to_dense())


@given(block_masks(MOST, batch=2, heads=2), SEEDS)
def test_plans_list_what_the_rows_hold_full_tiles_first(mask, seed):
    loose = loosen(mask, seed)
    arrays = loose.indptr, loose.indices, loose.tile, loose.words, loose.pattern
    lengths, blocks = (mask.q_len, mask.k_len), (mask.block_q, mask.block_k)
    plan = plan_of(*arrays, (2, 2), 1, lengths, blocks)
    for side, lists, transposed in (
        (plan.rows(mask.block_q), plan._own[0], False),
        (plan.columns(mask.block_k), plan._own[1], True),
    ):
        dense = dense_of_lists(loose, lists.start, lists.count, lists.index, lists.tile, transposed=transposed)
        assert torch.equal(dense[loose.pattern.long()], replace(loose, lengths=None).to_dense())
        for start, full, count in torch.stack([lists.start, lists.full, lists.count], 1).tolist():
            assert (lists.tile[start : start + full] == 0).all()
            assert (lists.tile[start + full : start + count] > 0).all()
            for part in (lists.index[start : start + full], lists.index[start + full : start + count]):
                assert (part.diff() > 0).all()
        numbers = side.work[:, 0, 0].sort().values
        assert torch.equal(numbers, torch.arange(len(numbers), dtype=torch.int32)), "each program has one item"


@given(block_masks(MOST, batch=2, heads=2), SEEDS)
@settings(max_examples=10)
def test_planning_waits_for_nothing(mask, seed):
    loose = loosen(mask, seed)
    lengths = torch.tensor([5, MOST])
    with NoWaiting():
        padded = loose.with_lengths(lengths)
        arrays = padded.indptr, padded.indices, padded.tile, padded.words, padded.pattern
        plan = plan_of(*arrays, (2, 2), 1, (mask.q_len, mask.k_len), (mask.block_q, mask.block_k))
        plan.rows(16), plan.columns(16)


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.unique(),
        lambda x: torch.repeat_interleave(torch.arange(3), x),
        lambda x: bool((x > 0).any()),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: torch.tensor([1, 2]),
    ],
)
def test_waiting_is_noticed(waits):
    x = torch.arange(3)
    with pytest.raises(AssertionError, match="would wait for the device"), NoWaiting():
        waits(x)


# ---------------------------------------------------------------------- attention


@dataclass(frozen=True)
class Loosened:
    """A recipe whose mask is made loose."""

    recipe: Recipe
    seed: int

    def mask(self):
        return loosen(self.recipe.mask(), self.seed)


def loose_problems(**sizes):
    drawn = problems(value_dims=(16,), **sizes).filter(lambda problem: problem.recipe is not None)
    return st.builds(lambda p, seed: replace(p, recipe=Loosened(p.recipe, seed)), drawn, SEEDS)


@given(loose_problems(most_tokens=150, head_dims=(8, 16), blocks=(16, 32), dtypes=(torch.float64, torch.float32)))
def test_blockwise_is_exact(problem):
    check(problem, "blockwise")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@given(data=st.data())
@settings(max_examples=max(1, settings().max_examples // 3))
def test_the_kernel_is_exact_in_the_interpreter(dtype, data):
    sizes = {"most_tokens": 40, "head_dims": (16,), "blocks": (16, 32), "dtypes": (dtype,)}
    check(data.draw(loose_problems(**sizes, most_heads=2)), "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_the_kernel_is_exact_on_the_gpu(dtype):
    @given(loose_problems(most_tokens=500, head_dims=(64,), blocks=(16, 64, 128), dtypes=(dtype,)))
    def run(problem):
        check(problem, "triton", "cuda")

    run()


def test_torch_compile_does_not_compile_again_for_a_loose_mask():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def step(q, k, v, mask):
        return attention(q * 2, k, v, mask, backend="blockwise").sin()

    torch.compiler.reset()
    compiled = torch.compile(step, backend=count, fullgraph=True)
    q, k, v = torch.randn(3, 1, 2, 100, 16)
    mask = masks.local(100, 30, block=16)
    for given_mask in (mask, loosen(mask, seed=0), loosen(mask, seed=1)):
        torch.testing.assert_close(compiled(q, k, v, given_mask), step(q, k, v, mask), rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1


def of_dead_tiles_only():
    """Block row 0 has two tiles, both dead; row 1 a dead one before a full one."""
    arrays = {"indptr": [0, 2, 4], "indices": [0, 1, 0, 1, 1], "tile": [1, 1, 1, 0, 0], "pattern": [[0]]}
    arrays = {name: torch.tensor(values, dtype=torch.int32) for name, values in arrays.items()}
    return BlockMask(32, 32, 16, 16, bits=torch.zeros(1, 16, 1, dtype=torch.int32), **arrays, loose=True).validate()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("backend", ["triton", "blockwise", "reference"])
def test_queries_whose_every_tile_is_dead_give_zeros(backend, dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 32, 16, generator=generator).to(dtype).requires_grad_() for _ in range(3))
    out, lse = attention(q, k, v, of_dead_tiles_only(), return_lse=True, backend=backend)
    assert (out[:, :, :16] == 0).all() and (lse[:, :, :16] == -torch.inf).all()
    assert out[:, :, 16:].isfinite().all() and lse[:, :, 16:].isfinite().all()
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    for gradient, dead in ((dq, slice(0, 16)), (dk, slice(0, 16)), (dv, slice(0, 16))):
        assert (gradient[:, :, dead] == 0).all()
        assert gradient[:, :, 16:].isfinite().all()
    assert (dv[:, :, 16:] != 0).any()


# ---------------------------------------------------------------------- validate


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        (r"indptr must run from 0 to at most the \d+ stored tiles", {"indptr": lambda m: m.indptr + 1}),
        (r"indptr must run from 0 to at most the 3 stored tiles", {
            "indices": lambda m: m.indices[:3], "tile": lambda m: m.tile[:3]
        }),
        (r"indptr must not decrease", {"indptr": lambda m: m.indptr.flip(0) - m.indptr[-1]}),
        (r"indices must lie in 0\.\.6", {"indices": lambda m: torch.cat([m.indices[:-1], m.indices[-1:] + 7])}),
        (r"indices must strictly increase in a row", {"indices": lambda m: torch.zeros_like(m.indices)}),
        (r"tile must lie in 0\.\.\d+", {"tile": lambda m: torch.cat([m.tile[:-1], m.tile[-1:] + 99])}),
        (r"bits past the block must be 0", {"bits": lambda m: m.bits | (1 << 20)}),
        (r"scores past q_len or k_len must be dead", {"tile": lambda m: torch.zeros_like(m.tile)}),
        (r"pattern must lie in 0\.\.\d+", {"pattern": lambda m: m.pattern + 99}),
        (r"lengths must lie in 0\.\.100", {"lengths": lambda m: torch.tensor([101], dtype=torch.int32)}),
    ],
)  # fmt: skip
def test_validate_names_what_makes_a_loose_mask_unsafe(rule, changes):
    mask = example()
    assert mask.indptr[-1] < len(mask.indices), "the example must have room for this test to mean anything"
    broken = dataclasses.replace(mask, **{name: change(mask) for name, change in changes.items()})
    with pytest.raises(ValueError, match=rf"^not a valid BlockMask: {rule}"):
        broken.validate()


def test_what_a_loose_mask_may_have_is_refused_in_another():
    with pytest.raises(ValueError, match=re.escape("not a valid BlockMask")):
        dataclasses.replace(example(), loose=False).validate()


@given(block_masks(90, blocks=(16, 32)), SEEDS)
def test_what_leaves_the_library_is_the_canonical_form(tmp_path_factory, mask, seed):
    loose, folder = loosen(mask, seed), tmp_path_factory.mktemp("loose")
    for name, m in (("loose", loose), ("canonical", mask)):
        m.save(folder / name)
    assert (folder / "loose").read_bytes() == (folder / "canonical").read_bytes()
    assert torch.equal(interop.to_sdpa(loose), interop.to_sdpa(mask))
    for export in (interop.to_fa4, interop.to_flashinfer, interop.to_flashmask, interop.to_deepspeed):
        assert outcome(export, loose) == outcome(export, mask)


def outcome(export, mask):
    """The tensors that come out, as lists; or the error."""
    try:
        leaves, _ = tree_flatten(export(mask))
    except ValueError as error:
        return str(error)
    return [x.tolist() if isinstance(x, torch.Tensor) else x for x in leaves]


@given(block_masks(90, blocks=(16, 32), heads=2), SEEDS)
def test_what_is_said_of_a_loose_mask_is_said_of_its_canonical_form(mask, seed):
    loose = loosen(mask, seed)
    for say in (
        analysis.density,
        analysis.balance,
        analysis.coarsening,
        analysis.lint,
        lambda m: analysis.flops(m, 64),
    ):
        assert say(loose) == say(mask)
    if mask.q_len == mask.k_len:
        assert analysis.reach(loose, 2) == analysis.reach(mask, 2)
