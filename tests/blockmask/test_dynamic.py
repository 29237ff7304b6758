import dataclasses
import pickle
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_flatten

from sparseflash import BlockMask, analysis, attention, interop, masks
from sparseflash.blockmask import bitmask
from sparseflash.blockmask.csr import row_of_entry
from tests.backends.triton.plans import plan
from tests.compared.exactness import check
from tests.drawn.counts import examples_times
from tests.drawn.dynamic_masks import dynamic_problems, made_dynamic
from tests.drawn.masks import SEEDS, block_masks
from tests.watched.waiting import NoWaiting

MOST = 120


def drawn_masks():
    return block_masks(MOST, batch=2, heads=3)


def example(**changes):
    mask = made_dynamic(masks.local(100, window=30, block=16), seed=3)
    return dataclasses.replace(mask, **{name: change(mask) for name, change in changes.items()})


# ---------------------------------------------------------------------- the mask


@given(drawn_masks(), SEEDS)
def test_a_dynamic_mask_is_the_mask_that_it_was_made_from(mask, seed):
    dynamic = made_dynamic(mask, seed)
    assert dynamic.validate() is dynamic
    canonical = dynamic.canonical()
    assert not canonical.dynamic and canonical.canonical() is canonical
    canonical.validate()
    for name in ("indptr", "indices", "tile", "bits", "pattern"):
        assert torch.equal(getattr(canonical, name), getattr(mask, name)), name
    assert dynamic == mask and mask == dynamic and dynamic == made_dynamic(mask, seed + 1)
    assert hash(dynamic) == hash(mask)
    assert torch.equal(dynamic.to_dense(), mask.to_dense())
    assert dynamic.density == mask.density
    assert dynamic.shape == mask.shape
    assert repr(dynamic) == f"{repr(mask)[:-1]}, dynamic)"
    back = pickle.loads(pickle.dumps(dynamic))
    assert back == mask and not back.dynamic


@given(drawn_masks(), drawn_masks(), SEEDS)
def test_dynamic_masks_differ_when_their_scores_do(mask, other, seed):
    assert (made_dynamic(mask, seed) == made_dynamic(other, seed)) == (mask == other)


def test_the_canonical_form_is_made_once_and_serves_masks_with_other_lengths():
    dynamic = example()
    assert dynamic.canonical() is dynamic.canonical()
    padded = dynamic.with_lengths(torch.tensor([7, 99]))
    assert padded.canonical().indices is dynamic.canonical().indices
    assert padded.canonical().lengths.tolist() == [[7, 99]] * 2
    assert padded == masks.local(100, window=30, block=16).with_lengths(torch.tensor([7, 99]))


def test_lengths_and_moving_keep_a_mask_dynamic():
    dynamic = example()
    padded = dynamic.with_lengths(torch.tensor([5]))
    assert padded.dynamic and padded.indices is dynamic.indices
    assert padded.to("meta").dynamic and dynamic.to("cpu") is dynamic
    assert not masks.causal(64).dynamic and not masks.causal(64).with_lengths(torch.tensor([5])).dynamic


def test_constructors_of_the_library_are_not_dynamic_and_pay_nothing():
    mask = masks.causal(64, block=16)
    assert mask.canonical() is mask


# ---------------------------------------------------------------------- what is derived from it


def test_entries_in_the_room_belong_to_the_row_past_the_last():
    indptr = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    assert row_of_entry(indptr, 5).tolist() == [0, 0, 2, 2, 2]
    assert row_of_entry(indptr, 8).tolist() == [0, 0, 2, 2, 2, 3, 3, 3]
    assert row_of_entry(torch.zeros(3, dtype=torch.int32), 2).tolist() == [2, 2]


def dense_of_lists(mask, starts, counts, index, tile, *, transposed):
    (row_blocks, col_blocks), (block_q, block_k) = mask.blocks, (mask.block_q, mask.block_k)
    live = bitmask.unpack(mask.bits, block_k)
    lines = col_blocks if transposed else row_blocks
    dense = torch.zeros(len(starts) // lines, row_blocks, col_blocks, block_q, block_k, dtype=torch.bool)
    for line, (start, count) in enumerate(zip(starts.tolist(), counts.tolist())):
        for e in range(start, start + count):
            at = (int(index[e]), line % lines) if transposed else (line % lines, int(index[e]))
            dense[(line // lines, *at)] = True if tile[e] == 0 else live[tile[e] - 1]
    return dense.transpose(2, 3).reshape(len(dense), row_blocks * block_q, -1)[:, : mask.q_len, : mask.k_len]


@given(block_masks(MOST, batch=2, heads=2), SEEDS)
def test_columns_hold_what_the_rows_hold(mask, seed):
    dynamic = made_dynamic(mask, seed)
    indptr, indices, tile = dynamic.columns
    assert len(indices) == len(dynamic.indices) and indptr[-1] == dynamic.indptr[-1]
    assert ((indices >= 0) & (indices < mask.blocks[0])).all(), "in range, the room too"
    dense = dense_of_lists(dynamic, indptr[:-1], indptr.diff(), indices, tile, transposed=True)
    assert torch.equal(dense[dynamic.pattern.long()], dataclasses.replace(dynamic, lengths=None).to_dense())


@pytest.mark.parametrize("col_blocks", [16_383, 16_384, 20_000, 32_767, 32_768, 70_000])
def test_columns_are_right_however_wide_the_mask(col_blocks):
    """Columns are sorted in 16 bits if these hold all numbers."""
    used = [0, 5, col_blocks - 2, col_blocks - 1]
    indptr, indices = torch.tensor([0, len(used)]), torch.tensor([*used, col_blocks - 1, 3])
    tile = torch.tensor([1, 0, 0, 1, 1, 0])
    arrays = [x.to(torch.int32) for x in (indptr, indices, tile, torch.ones(1, 16, 1), torch.zeros(1, 1))]
    mask = BlockMask(16, col_blocks * 16, 16, 16, *arrays, dynamic=True)
    starts, rows, kinds = mask.columns
    assert starts.diff().nonzero()[:, 0].tolist() == used and int(starts[-1]) == len(used)
    assert kinds.tolist() == [1, 0, 0, 1, 0, 0] and rows[: len(used)].tolist() == [0] * len(used)


@given(block_masks(MOST, batch=2, heads=2), SEEDS)
def test_plans_list_what_the_rows_hold_full_tiles_first(mask, seed):
    dynamic = made_dynamic(mask, seed)
    made = plan(dynamic, 2, 2, 1)
    for axis, tile in enumerate((mask.block_q, mask.block_k)):
        work, lists, transposed = made.worklist(axis, tile), made.lists.own(axis), axis == 1
        dense = dense_of_lists(dynamic, lists.start, lists.count, lists.index, lists.tile, transposed=transposed)
        assert torch.equal(dense[dynamic.pattern.long()], dataclasses.replace(dynamic, lengths=None).to_dense())
        for start, full, count in torch.stack([lists.start, lists.full, lists.count], 1).tolist():
            assert (lists.tile[start : start + full] == 0).all()
            assert (lists.tile[start + full : start + count] > 0).all()
            for part in (lists.index[start : start + full], lists.index[start + full : start + count]):
                assert (part.diff() > 0).all()
        numbers = work.work[:, 0, 0].sort().values
        assert torch.equal(numbers, torch.arange(len(numbers), dtype=torch.int32)), "each program has one item"


@given(block_masks(MOST, batch=2, heads=2), SEEDS)
@settings(max_examples=10)
def test_planning_waits_for_nothing(mask, seed):
    dynamic = made_dynamic(mask, seed)
    lengths = torch.tensor([5, MOST])
    with NoWaiting():
        padded = dynamic.with_lengths(lengths)
        made = plan(padded, 2, 2, 1)
        made.worklist(0, 16), made.worklist(1, 16)


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


@given(dynamic_problems(most_tokens=150, head_dims=(8, 16), blocks=(16, 32), dtypes=(torch.float64, torch.float32)))
def test_blockwise_is_exact(problem):
    check(problem, "blockwise")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@given(data=st.data())
@examples_times(1 / 3)
def test_the_kernel_is_exact_in_the_interpreter(dtype, data):
    sizes = {"most_tokens": 40, "head_dims": (16,), "blocks": (16, 32), "dtypes": (dtype,)}
    check(data.draw(dynamic_problems(**sizes, most_heads=2)), "triton")


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_the_kernel_is_exact_on_the_gpu(dtype):
    @given(dynamic_problems(most_tokens=500, head_dims=(64,), blocks=(16, 64, 128), dtypes=(dtype,)))
    def run(problem):
        check(problem, "triton", "cuda")

    run()


def test_torch_compile_does_not_compile_again_for_a_dynamic_mask():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def step(q, k, v, mask):
        return attention(q * 2, k, v, mask, backend="blockwise").sin()

    torch.compiler.reset()
    compiled = torch.compile(step, backend=count, fullgraph=True)
    q, k, v = torch.randn(3, 1, 2, 100, 16)
    mask = masks.local(100, window=30, block=16)
    for given_mask in (mask, made_dynamic(mask, seed=0), made_dynamic(mask, seed=1)):
        torch.testing.assert_close(compiled(q, k, v, given_mask), step(q, k, v, mask), rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1


def of_dead_tiles_only():
    arrays = {"indptr": [0, 2, 4], "indices": [0, 1, 0, 1, 1], "tile": [1, 1, 1, 0, 0], "pattern": [[0]]}
    arrays = {name: torch.tensor(values, dtype=torch.int32) for name, values in arrays.items()}
    return BlockMask(32, 32, 16, 16, bits=torch.zeros(1, 16, 1, dtype=torch.int32), **arrays, dynamic=True).validate()


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
        (r"lengths of keys must lie in 0\.\.100", {"lengths": lambda m: torch.tensor([[3], [101]], dtype=torch.int32)}),
    ],
)  # fmt: skip
def test_validate_names_what_makes_a_dynamic_mask_unsafe(rule, changes):
    mask = example()
    assert mask.indptr[-1] < len(mask.indices), "the example must have room for this test to mean anything"
    broken = dataclasses.replace(mask, **{name: change(mask) for name, change in changes.items()})
    with pytest.raises(ValueError, match=rf"^not a valid BlockMask: {rule}"):
        broken.validate()


def test_what_a_dynamic_mask_may_have_is_refused_in_another():
    with pytest.raises(ValueError, match=re.escape("not a valid BlockMask")):
        dataclasses.replace(example(), dynamic=False).validate()


@given(block_masks(90, blocks=(16, 32)), SEEDS)
def test_what_leaves_the_library_is_the_canonical_form(tmp_path_factory, mask, seed):
    dynamic, folder = made_dynamic(mask, seed), tmp_path_factory.mktemp("dynamic")
    for name, m in (("dynamic", dynamic), ("canonical", mask)):
        m.save(folder / name)
    assert (folder / "dynamic").read_bytes() == (folder / "canonical").read_bytes()
    assert torch.equal(interop.to_sdpa(dynamic), interop.to_sdpa(mask))
    for export in (interop.to_fa4, interop.to_flashinfer, interop.to_flashmask, interop.to_deepspeed):
        assert outcome(export, dynamic) == outcome(export, mask)


def outcome(export, mask):
    try:
        leaves, _ = tree_flatten(export(mask))
    except ValueError as error:
        return str(error)
    return [x.tolist() if isinstance(x, torch.Tensor) else x for x in leaves]


@given(block_masks(90, blocks=(16, 32), heads=2), SEEDS)
def test_what_is_said_of_a_dynamic_mask_is_said_of_its_canonical_form(mask, seed):
    dynamic = made_dynamic(mask, seed)
    for say in (
        analysis.density,
        analysis.balance,
        analysis.coarsening,
        analysis.lint,
        lambda m: analysis.flops(m, 64),
    ):
        assert say(dynamic) == say(mask)
    if mask.q_len == mask.k_len:
        assert analysis.reach(dynamic, 2) == analysis.reach(mask, 2)
