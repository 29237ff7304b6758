"""`select_blocks` against its formula, an entry at a time, by both ways to the choice."""

import importlib
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash import BlockMask, masks
from sparseflash.grouped import selected_attention
from sparseflash.masks import select_blocks
from sparseflash.masks.select_blocks import lists_of
from sparseflash.masks.tiling.columns import Columns
from tests.drawn.counts import examples_times
from tests.drawn.masks import SEEDS
from tests.masks.chosen_blocks import WAYS, by, generator

few = examples_times(1 / 2)


def by_formula(q, k, top_k, span, block_q, reduce, causal, sinks, near, sums=None):
    """The docstring's rule, with Python's sort: int64 `[B, H, lists, top_k]`."""
    (batch, heads, q_len, _), (_, kv_heads, k_len, _) = q.shape, k.shape
    scores = q.double() @ k.double().repeat_interleave(heads // kv_heads, 1).mT
    shift = k_len - q_len
    live = torch.ones(q_len, k_len, dtype=torch.bool)
    if causal:
        live = torch.arange(k_len) <= torch.arange(q_len)[:, None] + shift
    origin = torch.zeros(q_len, dtype=torch.int64)  # the first block of a query's sequence
    if sums is not None:
        sequence = torch.bucketize(torch.arange(q_len), torch.tensor(sums[1:]), right=True)
        live = live & (sequence[:, None] == sequence)
        origin = torch.tensor(sums)[sequence] // span
    index = torch.full((batch, heads, -(-q_len // block_q), top_k), -1)
    for i in range(index.shape[2]):
        rows = slice(i * block_q, min(q_len, i * block_q + block_q))
        own = (rows.start + shift) // span, (rows.stop - 1 + shift) // span
        for b, h in torch.cartesian_prod(torch.arange(batch), torch.arange(heads)).tolist():
            found = []
            for j in range(-(-k_len // span)):
                tile, seen = (x[rows, j * span : j * span + span] for x in (scores[b, h], live))
                value = float(tile.mean() if reduce == "mean" else tile.masked_fill(~seen, -torch.inf).max())
                near_end = own[1] + (1 if causal else near)
                forced = j < origin[rows.start] + sinks or (near > 0 and own[0] - near < j < near_end)
                if seen.any() and (forced or value > -torch.inf):
                    found.append((not forced, 0 if forced else -value, j))
            best = torch.tensor([j for _, _, j in sorted(found)[:top_k]], dtype=torch.int64)
            index[b, h, i, : len(best)] = best
    return index


@few
@given(
    WAYS, st.integers(1, 40), st.integers(1, 150), st.sampled_from([(1, 2, 1), (2, 2, 2)]),
    st.sampled_from([1, 4, 16, 32, 64, 128]), st.sampled_from([1, 1, 2, 16, 64]), st.sampled_from([3, 4, 9]),
    st.sampled_from(["max", "mean"]), st.booleans(), st.integers(0, 1), st.integers(0, 1),
    st.sampled_from([torch.float32, torch.float16]), SEEDS,
)  # fmt: skip
@example("kernels", 5, 150, (1, 2, 1), 4, 1, 4, "max", True, 1, 1, torch.float16, 0)  # several sorts of a list
@example("kernels", 40, 20, (1, 2, 1), 16, 1, 4, "max", True, 0, 1, torch.float32, 1)  # queries before all keys
@example("kernels", 3, 150, (1, 2, 1), 128, 2, 3, "max", False, 0, 0, torch.float32, 2)  # two tiles of keys a block
@example("kernels", 40, 150, (1, 2, 1), 16, 1, 3, "max", True, 1, 1, torch.float16, 3)  # some groups that all rows see
@example("kernels", 40, 150, (1, 2, 1), 1, 1, 3, "mean", True, 0, 1, torch.float32, 4)  # taken one by one
@example("operations", 1, 49, (1, 2, 1), 16, 16, 3, "max", False, 1, 1, torch.float32, 0)  # three may be always kept
def test_the_best_blocks_are_those_of_the_formula(
    way, q_len, k_len, heads, span, block_q, top_k, reduce, causal, sinks, near, dtype, seed
):
    batch, q_heads, kv_heads = heads
    if block_q > span and near:  # such lists would always have more than top_k
        near = 0
    top_k = max(top_k, 4) if sinks and near else top_k  # the most that may always be kept
    if reduce == "mean" and (q_len % block_q or k_len % span):  # thirds are not exact
        q_len, k_len = q_len * block_q, k_len // span * span + span
    g = generator(seed)
    q, k = (  # whole numbers, so every sum is exact, with many ties
        torch.randint(-2, 3, (batch, h, n, 8), generator=g).to(dtype) for h, n in ((q_heads, q_len), (kv_heads, k_len))
    )
    more = {"top_k": top_k, "span": span, "block_q": block_q, "reduce": reduce, "causal": causal}
    with by(way):
        got = select_blocks(q, k, scale=1.0, sink_blocks=sinks, local_blocks=near, **more)
    assert got.dtype == torch.int32
    assert torch.equal(got.long(), by_formula(q, k, **more, sinks=sinks, near=near))


@few
@given(
    WAYS, st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 20),
    st.sampled_from([(1, 2, 1), (2, 2, 2)]), st.sampled_from([(1, 1), (4, 1), (16, 1), (16, 4), (4, 16), (64, 1)]),
    st.sampled_from([3, 9, 130]), st.sampled_from(["max", "mean"]), st.booleans(), st.integers(0, 1),
    st.integers(0, 1), SEEDS,
)  # fmt: skip
@example("kernels", [3, 2], 1, (1, 2, 1), (64, 1), 3, "max", True, 1, 1, 0)  # a document begins in a later tile
@example("kernels", [1, 2, 1], 0, (1, 2, 1), (4, 16), 9, "mean", True, 0, 0, 0)  # one mean of queries a list
@example("kernels", [0, 1], 0, (1, 2, 1), (4, 16), 130, "max", False, 1, 0, 0)  # long lists of blocks of queries
@example("kernels", [2, 1], 70, (1, 2, 1), (256, 64), 130, "max", True, 1, 1, 0)  # long blocks, in parts
def test_no_query_chooses_blocks_of_another_sequence(
    way, sizes, rest, heads, blocks, top_k, reduce, causal, sinks, near, seed
):
    (span, block_q), (batch, q_heads, kv_heads) = blocks, heads
    near = 0 if block_q > span else near
    step = max(span, block_q)
    if reduce == "mean":  # thirds are not exact
        rest = 0
    sums = torch.tensor([0, *(size * step for size in sizes), rest]).cumsum(0).tolist()
    if not sums[-1]:
        return
    g = generator(seed)
    q, k = (torch.randint(-2, 3, (batch, h, sums[-1], 8), generator=g).float() for h in (q_heads, kv_heads))
    more = {"top_k": top_k, "span": span, "block_q": block_q, "reduce": reduce, "causal": causal}
    with by(way):
        got = select_blocks(q, k, scale=1.0, sink_blocks=sinks, local_blocks=near, cu_seqlens=sums, **more)
    assert torch.equal(got.long(), by_formula(q, k, **more, sinks=sinks, near=near, sums=sums))


@few
@given(
    WAYS, st.integers(1, 30), st.integers(120, 400), st.sampled_from([1, 2]), st.sampled_from([129, 200]),
    st.booleans(), st.sampled_from([torch.float32, torch.float16]), SEEDS,
)  # fmt: skip
@example("kernels", 3, 300, 1, 200, True, torch.float16, 0)
def test_long_lists_are_those_of_the_formula(way, q_len, k_len, span, top_k, causal, dtype, seed):
    g = generator(seed)
    q, k = (torch.randint(-2, 3, (1, 2, n, 8), generator=g).to(dtype) for n in (q_len, k_len))
    more = {"top_k": top_k, "span": span, "block_q": 1, "reduce": "max", "causal": causal}
    with by(way), mock.patch.object(importlib.import_module("sparseflash.masks.fused.block_scores"), "_AT_ONCE", 8192):
        got = select_blocks(q, k, scale=1.0, sink_blocks=1, local_blocks=2, **more)
    assert torch.equal(got.long(), by_formula(q, k, **more, sinks=1, near=2))


@few
@given(
    st.integers(1, 16), st.integers(1, 300), st.sampled_from([(1, 2, 1), (2, 2, 2)]), st.sampled_from([1, 1, 4, 128]),
    st.sampled_from([1, 16, 128]), st.sampled_from([4, 9]), st.booleans(), st.integers(0, 1), st.integers(0, 1), SEEDS,
)  # fmt: skip
@example(1, 300, (2, 2, 2), 1, 128, 9, True, 1, 1, 0)  # one new token, more blocks than there are
def test_few_queries_of_many_keys_have_the_lists_of_one_walk(
    q_len, k_len, sizes, rows, span, top_k, causal, sinks, near, seed
):
    g, (batch, heads, kv_heads) = generator(seed), sizes
    q, k = (torch.randint(-2, 3, (batch, h, n, 16), generator=g).half() for h, n in ((heads, q_len), (kv_heads, k_len)))
    of = Columns(rows, 1, span, 1, q_len, k_len, causal, sinks, near)
    select = importlib.import_module("sparseflash.masks.fused.select")
    with by("kernels"):
        walked = lists_of(q, k, of, top_k, 1.0)
        with mock.patch.object(select, "_MANY_COLUMNS", 1):
            shared = lists_of(q, k, of, top_k, 1.0)
            unordered = lists_of(q, k, of, top_k, 1.0, in_order=False)
    assert torch.equal(shared, walked)
    by_number = torch.where(walked < 0, k_len, walked).sort(-1).values
    assert torch.equal(unordered, by_number.masked_fill(by_number == k_len, -1))


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter's maximum
@few
@given(
    WAYS, st.integers(1, 150), st.integers(0, 150), st.sampled_from([(1, 16), (1, 128), (1, 1), (16, 1), (64, 1)]),
    st.sampled_from([4, 9]), st.integers(0, 1), st.booleans(), SEEDS,
)  # fmt: skip
@example("kernels", 17, 150, (16, 1), 4, 0, True, 0)
@example("kernels", 17, 150, (16, 1), 4, 0, False, 0)
@example("operations", 17, 150, (1, 16), 4, 1, False, 0)
def test_a_query_at_the_end_of_a_cache_does_not_choose_the_room_behind_it(
    way, tokens, room, sizes, top_k, sinks, shares, seed
):
    g, (span, column_tokens) = generator(seed), sizes
    columns, filled = -(-(tokens + room) // column_tokens), -(-tokens // column_tokens)
    q, k = (torch.randint(-2, 3, (2, h, n, 16), generator=g).half() for h, n in ((4, 1), (2, columns)))
    k[:, :, filled:] = torch.nan
    of = Columns(1, 1, span, column_tokens, 1, tokens, True, sinks, 1)
    bounds = torch.tensor([[0], [tokens]], dtype=torch.int32)
    select = importlib.import_module("sparseflash.masks.fused.select")
    with by(way), mock.patch.object(select, "_MANY_COLUMNS", 1 if shares else 2048):
        want = lists_of(q, k[:, :, :filled], of, top_k, 1.0, in_order=False)
        got = lists_of(q, k, of._replace(k_len=tokens + room), top_k, 1.0, bounds, in_order=False)
    assert torch.equal(got, want)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter's maximum
@pytest.mark.parametrize("way", ["operations", "kernels"])
def test_minus_infinity_and_nan_are_never_chosen(way):
    q, k = torch.ones(1, 1, 3, 8), torch.ones(1, 1, 64, 8)
    k[:, :, 16:32], k[:, :, 32:48, 0], k[:, :, 33, 0] = -torch.inf, torch.nan, 1.0
    k[:, :, 48:] = -0.0
    q[:, :, 2] = torch.nan
    with by(way):
        got = select_blocks(q, k, top_k=4, span=16)
        lists = got[0, 0].tolist()
    assert lists == [[0, 2, 3, -1]] * 2 + [[-1] * 4]  # in block 2 one score is a number


@pytest.mark.parametrize("way", ["operations", "kernels"])
def test_of_equal_scores_the_first_block_wins(way):
    q, k = torch.zeros(1, 1, 2, 8), torch.ones(1, 1, 160, 8)
    q[:, :, 1] = -0.0  # minus zero equals zero
    k[:, :, ::32] = -1.0
    with by(way):
        assert select_blocks(q, k, top_k=3, span=16).tolist() == [[[[0, 1, 2]] * 2]]


def test_lists_serve_the_calls_that_they_are_for():
    q, k, v = (torch.randn(1, h, 100, 16, generator=generator(h)) for h in (4, 2, 3))
    v = v[:, :2]
    index = select_blocks(q[:, ::2], k, top_k=2, span=16, causal=True, local_blocks=1)
    selected_attention(q, k, v, index, span=16)
    mask = masks.selected_keys(index, k_len=100, block=16, span=16, causal=True, group=2)
    assert mask.to_dense().any(-1).all()
    shared = select_blocks(q, k, top_k=2, span=32, block_q=32)
    assert BlockMask.from_block_index(shared, block=32, q_len=100).density > 0


Q, K = torch.zeros(1, 4, 100, 16), torch.zeros(1, 2, 100, 16)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"top_k": 0}, ValueError, r"top_k must be at least 1 block; got 0"),
        ({"span": 48}, ValueError, r"span must be a power of two from 1 to 256; got 48"),
        ({"block_q": 256}, ValueError, r"block_q must be a power of two from 1 to 128; got 256"),
        ({"reduce": "sum"}, ValueError, r"reduce must be 'max' or 'mean'; got 'sum'"),
        ({"causal": 1}, TypeError, r"causal must be True or False; got 1"),
        ({"scale": "1"}, TypeError, r"scale must be a number; got"),
        (
            {"cu_seqlens": [0, 40, 100], "span": 16},
            ValueError,
            r"cu_seqlens must be multiples of 16, of block_q and span, except for the last; got \(0, 40, 100\)\. Leave",
        ),
        (
            {"cu_seqlens": [0, 90]},
            ValueError,
            r"cu_seqlens must end with the number of tokens of q and of k, 100 and 100; got 90",
        ),
        (
            {"sink_blocks": 2, "local_blocks": 1, "span": 16},
            ValueError,
            r"top_k must be at least the 3 blocks that sink_blocks and local_blocks may keep; got 2",
        ),
    ],
)
def test_what_is_refused_and_why(arguments, error, message):
    with pytest.raises(error, match=message):
        select_blocks(Q, K, **({"top_k": 2} | arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("span", "block_q", "reduce", "top_k"),
    [(128, 1, "max", 3), (64, 64, "max", 3), (4, 1, "max", 3), (64, 1, "mean", 3), (1, 1, "max", 200)],
)
@pytest.mark.parametrize("sums", [None, [0, 128, 384]])
def test_the_best_blocks_are_those_of_the_formula_on_the_gpu(dtype, span, block_q, reduce, top_k, sums):
    g = generator(0)
    q, k = (torch.randint(-2, 3, (2, h, 384, 128), generator=g).to(dtype) for h in (4, 2))
    more = {"top_k": top_k, "span": span, "block_q": block_q, "reduce": reduce, "causal": True}
    given = {**more, "scale": 1.0, "local_blocks": 1, "cu_seqlens": sums}
    got = select_blocks(q.cuda(), k.cuda(), **given)
    assert torch.equal(got.cpu().long(), by_formula(q, k, **more, sinks=0, near=1, sums=sums))
    assert torch.equal(got, select_blocks(q.cuda(), k.cuda(), **given))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("q_len", [1, 5])
def test_new_tokens_after_a_long_cache_choose_by_the_formula_on_the_gpu(dtype, q_len):
    g = generator(0)
    q, k = (torch.randint(-2, 3, (2, h, n, 64), generator=g).to(dtype) for h, n in ((2, q_len), (1, 3000)))
    more = {"top_k": 5, "span": 128, "block_q": 1, "reduce": "max", "causal": True}
    got = select_blocks(q.cuda(), k.cuda(), **more, scale=1.0, local_blocks=1)
    assert torch.equal(got.cpu().long(), by_formula(q, k, **more, sinks=0, near=1))
