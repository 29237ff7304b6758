from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.benchmarks.speed import patterns
from experiments.benchmarks.speed.precision import products_in_tf32
from sparseflash import BlockMask, attention, masks
from sparseflash.backends.triton.schedule import plan as planning
from sparseflash.backends.triton.schedule.retiling import Retiling
from sparseflash.backends.triton.schedule.tilings import FP32, HALF, Cost, Tiling, candidates, choose, step_of
from sparseflash.blockmask import bitmask
from tests.backends.triton.plans import WAYS, chunks_of, plan, tilings_of, tilings_taken_by
from tests.compared.exactness import check, loads
from tests.drawn.counts import examples_times
from tests.drawn.dynamic_masks import made_dynamic
from tests.drawn.masks import Recipe, block_masks
from tests.drawn.problems import Problem, problems
from tests.watched.waiting import NoWaiting, waiting_raises

LARGEST = (128, 128)


def retiled(mask):
    block = mask.block_q, mask.block_k
    arrays = mask.indptr, mask.indices, mask.tile, mask.words, mask.pattern
    return Retiling(*arrays, (mask.q_len, mask.k_len), block)


# ---------------------------------------------------------------------- the lists


def entries(lists, row):
    _, streamed, gathered = lists.tiling
    first, full, count = (int(x[row]) for x in (lists.start, lists.full, lists.count))
    blocks = lists.index.view(len(lists.tile), -1)
    width = gathered or streamed
    found = []
    for at in range(first, first + count):
        assert (lists.tile[at] == 0) == (at < first + full), "full tiles come first"
        tokens = (blocks[at].long()[:, None] * width + torch.arange(width)).reshape(-1)
        found.append((tokens, None if lists.tile[at] == 0 else int(lists.tile[at]) - 1))
    return found


def dense_of(lists, axis, patterns_, q_len, k_len):
    held, streamed, _ = lists.tiling
    shape = (held, streamed) if axis == 0 else (streamed, held)
    words = lists.words.view(-1, shape[0], bitmask.words_per_row(shape[1]))
    length, other = (q_len, k_len) if axis == 0 else (k_len, q_len)
    rows = -(-length // held)
    padded = torch.zeros(patterns_, rows * held, other + 2 * streamed, dtype=torch.int32)
    for row in range(patterns_ * rows):
        p, r = divmod(row, rows)
        for tokens, number in entries(lists, row):
            live = torch.ones(shape, dtype=torch.bool) if number is None else bitmask.unpack(words[number], shape[1])
            if axis == 1:
                live = live.T
            if number is None:
                assert (tokens < other).all() and (r + 1) * held <= length, "a full tile lies inside"
            padded[p, r * held : (r + 1) * held].index_add_(1, tokens.clamp(max=other + streamed), live.int())
    assert padded.max() <= 1 and not padded[:, length:].any() and not padded[..., other:].any()
    dense = padded[:, :length, :other].bool()
    return dense if axis == 0 else dense.transpose(1, 2)


@given(st.data())
def test_the_lists_of_every_tiling_have_the_live_scores_of_the_mask(data):
    mask = data.draw(block_masks(most_tokens=300, blocks=(16, 32, 64), batch=2, heads=3))
    mask = BlockMask(*mask._numbers(), *mask._arrays()[:5])
    want = mask.to_dense()
    for axis in (0, 1):
        block = (mask.block_q, mask.block_k)[:: 1 - 2 * axis]
        for tiling in candidates(block, (128, 64), (64, 128)):
            made = retiled(mask)
            lists = made.lists(axis, tiling)
            assert lists.tiling == tiling
            assert len(lists.tile) - 1 == made.count(axis, tiling) == int(lists.count.sum())
            dense = dense_of(lists, axis, int(mask.pattern.max()) + 1, mask.q_len, mask.k_len)
            assert torch.equal(dense[mask.pattern.long()], want)


@given(block_masks(most_tokens=300, blocks=(16, 32)), st.sampled_from([0, 1]))
def test_the_blocks_of_both_parts_of_a_gathered_list_increase(mask, axis):
    """Sequence lengths rely on it."""
    streamed = (mask.block_k, mask.block_q)[axis]
    lists = retiled(mask).lists(axis, Tiling(64, 128, streamed))
    blocks = lists.index.view(len(lists.tile), -1)
    past = mask.blocks[1 - axis]
    for start, full, count in zip(*(x.tolist() for x in (lists.start, lists.full, lists.count)), strict=True):
        for part in (blocks[start : start + full], blocks[start + full : start + count]):
            part = part.flatten()
            real = part[part < past]
            assert (real.diff() > 0).all()
            assert (part[: len(real)] == real).all() and (part[len(real) :] == past).all()
        assert (blocks[start : start + full] < past).all()


def test_gathered_tiles_are_full_where_enough_blocks_are():
    live = torch.zeros(16, 16 * 12, dtype=torch.bool)
    for block in (0, 2, 3, 5, 7, 9, 11):
        live[:, 16 * block : 16 * block + 16] = True
    live[3, 16 * 1] = live[5, 16 * 8 + 2] = True
    lists = retiled(BlockMask.from_dense(live, block=16)).lists(0, Tiling(16, 64, 16))
    assert (lists.full.tolist(), lists.count.tolist()) == ([1], [3])
    assert lists.index.view(-1, 4)[:3].tolist() == [[0, 2, 3, 5], [1, 7, 8, 9], [11, 12, 12, 12]]


def test_bits_of_equal_gathered_tiles_are_stored_once():
    mask = masks.local(1 << 14, window=512, block=16)
    lists = retiled(mask).lists(0, Tiling(64, 64, 16))
    assert len(lists.words) < 40 * 64 * 2
    assert int((lists.tile > 0).sum()) > 500


# ---------------------------------------------------------------------- the choice


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("kind", "block", "tiling"),
    [
        ("local", 16, (64, 64, 0)), ("local", 32, (64, 64, 0)), ("butterfly", 32, (64, 64, 0)),
        ("butterfly", 16, (16, 16, 0)), ("random12", 16, (16, 16, 0)), ("random12", 32, (32, 32, 0)),
        ("bigbird", 16, (16, 16, 0)), ("bigbird", 32, (64, 64, 32)),
    ],
)  # fmt: skip
def test_what_lies_close_is_united_and_what_is_strewn_is_gathered_or_left(kind, block, tiling, axis):
    """Each was the fastest, or within 2 % of it, in some pass on an H100."""
    assert retiled(patterns.block_mask(kind, 16384, block)).tiling(axis, (64, 64), (64, 64), HALF) == Tiling(*tiling)


@pytest.mark.parametrize("kind", ["butterfly", "local", "bigbird", "random12"])
def test_blocks_of_64_stay_where_tiles_of_64_are_taken(kind):
    assert retiled(patterns.block_mask(kind, 16384, 64)).tiling(0, (64, 64), (64, 64), HALF) == Tiling(64, 64)


def test_dense_blocks_of_64_are_united_up_to_the_tile_of_the_kernel():
    assert retiled(BlockMask.dense(2048, block=64)).tiling(0, (128, 64), (64, 64), HALF) == Tiling(128, 64)


@given(
    st.tuples(*[st.sampled_from([16, 32, 64, 128, 256])] * 2), st.tuples(*[st.sampled_from([16, 32, 64, 128])] * 2),
    st.tuples(*[st.sampled_from([16, 32, 64, 128])] * 2),
)  # fmt: skip
def test_candidates_can_be_walked_by_the_kernel(block, whole, gathered):
    found = candidates(block, whole, gathered)
    assert found[0] == Tiling(*block) and len(set(found)) == len(found)
    for tiling in found:
        assert tiling.held % block[0] == 0
        if tiling.gathered:
            assert tiling.gathered == block[1] < tiling.streamed == gathered[1]
            assert tiling.held <= max(block[0], gathered[0])
        else:
            assert tiling.streamed % block[1] == 0
            assert tiling.held <= max(block[0], whole[0]) and tiling.streamed <= max(block[1], whole[1])
    if block[0] >= whole[0] and block[1] >= max(whole[1], gathered[1]) and block[0] >= gathered[0]:
        assert len(found) == 1


@given(st.lists(st.integers(0, 10_000), min_size=6, max_size=6), st.integers(1, 10_000), st.sampled_from([HALF, FP32]))
def test_the_cheapest_is_taken_if_it_is_worth_it(counts, tokens, cost):
    found = candidates((16, 16), (64, 128), (64, 64))
    count = dict(zip(found, counts, strict=True))
    warps = {t: 1 + number for number, t in enumerate(found)}
    steps = {(step_of(t, (64, 64) if t.gathered else (64, 128)), t.gathered > 0): warps[t] for t in found}
    assert len(steps) == len(found)
    chosen = choose(found, count.__getitem__, tokens, (64, 128), (64, 64), cost, lambda *step: steps[step])
    prices = {t: cost.of_tiles(count[t], t, (64, 64) if t.gathered else (64, 128), tokens, warps[t]) for t in found}
    assert prices[chosen] <= prices[found[0]]
    assert chosen == found[0] or prices[chosen] == min(prices.values())
    if min(prices.values()) > cost.worth * prices[found[0]]:
        assert chosen == found[0]


def test_a_walk_costs_its_steps_and_its_programs():
    cost = Cost(loading=0.5, loading_gathered=1.5, step=0.25, program=4.0, worth=0.9)
    assert cost.of_step(64, 64) == 1 + 0.5 + 0.25
    assert cost.of_step(64, 64, gathered=True) == 1 + 1.5 + 0.25
    assert cost.of_step(16, 64) == 0.25 + 0.5 + 0.25
    assert cost.of_step(16, 16) == 0.0625 + 0.125 + 0.0625  # one warp
    assert cost.of_step(32, 32) == 0.25 + 0.25 + 0.25 and cost.of_step(32, 32, warps=2) == 0.25 + 0.25 + 0.125
    assert cost.of_step(64, 64, warps=8) == cost.of_step(64, 64)
    assert cost.of_tiles(3, Tiling(128, 128), (64, 128), 640) == 3 * 2 * 3.25 + 10 * 4.0


def test_held_tokens_are_those_of_all_patterns():
    made = retiled(masks.per_head([masks.causal(100, 70, block=16), masks.local(100, window=9, k_len=70, block=16)]))
    assert (made.held(0), made.held(1)) == (200, 140)


# ---------------------------------------------------------------------- what is left as it is


def half(tokens, heads=1, dim=16):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, tokens, dim, generator=generator).half().requires_grad_() for _ in range(3)]


def run(mask, tokens):
    q, k, v = half(tokens)
    attention(q, k, v, mask, backend="triton").sum().backward()


@pytest.mark.parametrize("kind", ["causal", "local", "butterfly", "random12"])
def test_masks_of_large_blocks_are_planned_as_they_are_without_a_question(kind):
    mask = patterns.block_mask(kind, 2048, 128)
    made = plan(mask)
    with mock.patch.object(Retiling, "lists", side_effect=AssertionError("made")), NoWaiting():
        for axis in (0, 1):
            tiling = made.tiling(axis, LARGEST, LARGEST, HALF)
            assert tiling == Tiling(128, 128)
            assert made.lists.get(axis, tiling) is made.lists.get(axis, None)


def test_a_dynamic_mask_is_run_in_its_own_tiles_and_not_waited_for():
    dynamic = made_dynamic(masks.local(60, window=30, block=16), 0)
    with NoWaiting():
        assert plan(dynamic).tiling(0, LARGEST, LARGEST, HALF) is None
    with tilings_taken_by(None):
        run(dynamic, 60)
        assert set(tilings_of(dynamic).values()) == {Tiling(16, 16)}


def test_small_problems_are_run_in_the_tiles_of_the_mask():
    mask = masks.local(60, window=30, block=16)
    run(mask, 60)
    assert set(tilings_of(mask).values()) == {Tiling(16, 16)}


def test_a_dense_plan_has_one_tiling():
    made = planning.dense_plan((1, 1), 1, (300, 300), LARGEST, torch.device("cpu"))
    assert made.tiling(0, LARGEST, LARGEST, HALF) is None
    with pytest.raises(RuntimeError, match=r"this plan supports only the tiles of its mask; got Tiling\(held=64"):
        made.worklist(0, 64, Tiling(64, 64))


def test_tilings_are_made_once_for_all_plans_of_a_mask():
    mask = masks.local(256, window=60, block=16)
    with tilings_taken_by("united"):
        run(mask, 256)
        taken = tilings_of(mask)
        assert taken["forward"] == Tiling(64, 128)
        with mock.patch.object(Retiling, "_lists", side_effect=AssertionError("made again")):
            q, k, v = half(256, heads=2)
            attention(q, k, v, mask.with_lengths(torch.tensor([99])), backend="triton").sum().backward()


def test_the_mask_can_be_freed_after_a_run():
    """What is kept with its array must not hold the array."""
    import gc
    import weakref

    mask = masks.local(64, window=30, block=16)
    with tilings_taken_by("united"):
        run(mask, 64)
        gone = weakref.ref(mask.indices)
        gc.disable()
        try:
            del mask
            assert gone() is None
        finally:
            gc.enable()


# ---------------------------------------------------------------------- attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@given(data=st.data())
@examples_times(1 / 2)
def test_the_kernel_is_exact_in_the_interpreter(dtype, data):
    problem = data.draw(
        problems(
            most_tokens=72, head_dims=(16, 24), value_dims=(16,), blocks=(16, 32, 64), dtypes=(dtype,),
            dropouts=(0.0, 0.0, 0.3), most_heads=2,
        ).filter(lambda problem: problem.recipe is not None)
    )  # fmt: skip
    chunks, way = data.draw(st.sampled_from([None, None, 64])), data.draw(st.sampled_from(["pointers", "descriptors"]))
    with tilings_taken_by(data.draw(st.sampled_from([None, *WAYS]))), loads(way), chunks_of(chunks):
        check(problem, "triton")


def strewn(dtype, block, lengths, dropout_p=0.0):
    arguments = {"q_len": 70, "k_len": 70, "block": (block, block), "heads": [[0, 1]], "holes": "both", "seed": 3,
                 "patterns": [["full", "random", "dead", "lower"], ["dead", "full", "full", "random"]]}  # fmt: skip
    return Problem(
        Recipe("from_dense", arguments, lengths), batch=2, heads=2, kv_heads=1, q_len=70, k_len=70, dim=16, v_dim=16,
        dtype=dtype, scale=None, layout="tokens first", seed=3, dropout_p=dropout_p,
    )  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("dtype", "lengths"),
    [(torch.float16, None), (torch.float16, (70, 51)), (torch.float16, (0, 39)), (torch.float32, (70, 51))],
    ids=str,
)
def test_every_way_is_exact_and_is_what_ran(dtype, way, lengths):
    problem = strewn(dtype, 16, lengths, dropout_p=0.3 if lengths == (70, 51) else 0.0)
    with tilings_taken_by(way):
        check(problem, "triton")
        taken = tilings_of(problem.mask)
    assert set(taken) == {"forward", "dq", "dk_dv"} | ({"means"} if dtype == torch.float32 else set())
    for tiling in taken.values():
        if way == "own":
            assert tiling == Tiling(16, 16)
        elif way == "united":
            assert tiling.gathered == 0 and min(tiling.held, tiling.streamed) >= 32
        else:
            assert tiling.gathered == 16 < tiling.streamed and (tiling.held == 16) == (way == "gathered, few held")


@pytest.mark.parametrize("way", ["pointers", "descriptors"])
def test_gathered_tiles_are_loaded_by_pointers(way):
    problem = strewn(torch.float16, 16, None)
    with tilings_taken_by("gathered"), loads(way):
        check(problem, "triton")
        assert all(tiling.gathered for tiling in tilings_of(problem.mask).values())


def test_the_same_bits_at_every_run_and_for_every_copy_of_a_mask():
    base = masks.butterfly(256, block=16)
    results = []
    for _ in range(2):
        mask = BlockMask(*base._numbers(), *(None if x is None else x.clone() for x in base._arrays()))
        tensors = half(256)
        with tilings_taken_by("gathered"):
            out = attention(*tensors, mask, backend="triton")
            results.append((out.detach(), *torch.autograd.grad(out.float().square().sum(), tensors)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_what_a_query_does_not_see_does_not_reach_it_from_a_block_that_is_missing():
    """The last gathered tile is filled up with blocks past the end."""
    layout = torch.zeros(16, 16, dtype=torch.bool)
    layout[:, 5] = True
    mask = BlockMask.from_layout(layout, block=16)
    q, k, v = half(256)
    with torch.no_grad():
        k[:, :, :80], v[:, :, :80], k[:, :, 96:], v[:, :, 96:] = (torch.nan for _ in range(4))
        with tilings_taken_by("gathered"):
            out = attention(q, k, v, mask, backend="triton")
            assert tilings_of(mask)["forward"].gathered == 16
    assert out.isfinite().all()


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", [None, *WAYS])
@pytest.mark.parametrize(
    ("arithmetic", "dim"),
    [("bfloat16", 64), ("bfloat16", 128), ("float16", 32), ("tf32", 64), ("float32", 64), ("bfloat16", 256)],
)
def test_the_kernel_is_exact_on_the_gpu(arithmetic, dim, way):
    dtype = torch.float32 if arithmetic == "tf32" else getattr(torch, arithmetic)

    @given(
        problems(
            most_tokens=700, head_dims=(dim,), value_dims=(dim,), blocks=(16, 32, 64), dtypes=(dtype,),
            dropouts=(0.0, 0.0, 0.3),
        ).filter(lambda problem: problem.recipe is not None),
        st.sampled_from(["pointers", "descriptors"]),
    )  # fmt: skip
    @examples_times(1 / 2)
    def run(problem, by):
        with tilings_taken_by(way), loads(by), products_in_tf32(arithmetic == "tf32"):
            check(problem, "triton", "cuda", arithmetic)

    run()


@pytest.mark.gpu
def test_blocks_of_16_wait_for_nothing_at_the_second_call():
    q, k, v = (torch.randn(1, 4, 4096, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = patterns.block_mask("bigbird", 4096, 16).to("cuda")
    with tilings_taken_by("gathered"):
        attention(q, k, v, mask).sum().backward()
        assert len(tilings_of(mask)) == 3 and all(tiling.gathered for tiling in tilings_of(mask).values())
        with waiting_raises():
            attention(q, k, v, mask).sum().backward()


def test_padding_may_change_from_call_to_call():
    problem = strewn(torch.float16, 32, (70, 51))
    with tilings_taken_by("gathered, few held"):
        check(problem, "triton")
        check(replace(problem, recipe=replace(problem.recipe, lengths=(33, 0))), "triton")
