import re
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash import BlockMask, attention, distributed, explain, masks, scores, testing
from sparseflash.backends.triton import call_cache, prepared_call
from sparseflash.backends.triton.changes import tile_bias
from sparseflash.backends.triton.overrides import override
from sparseflash.backends.triton.schedule.tile_places import TilePlaces
from sparseflash.blockmask.numbering import number_of_tile, tile_numbers
from tests.drawn.problems import problems

LOCAL = masks.local(70, window=20, block=16)
LAYOUT = torch.ones(2, 34, dtype=torch.bool)
LAYOUT[1] = torch.isin(torch.arange(34), torch.tensor([1, 2, 31, 33]))
HEADS = masks.per_head(
    [
        BlockMask.from_layout(LAYOUT, block=16, q_len=24, k_len=530), masks.local(24, 530, window=40, block=16),
        BlockMask.from_layout(LAYOUT, block=16, q_len=24, k_len=530),
    ]
)  # fmt: skip


def tensors(mask, batch=1, heads=2, kv_heads=1, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, mask.q_len, 16), *[(batch, kv_heads, mask.k_len, 16)] * 2
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def drawn(mask, *leading, dtype=torch.float64, seed=1):
    shape = *leading, len(mask.indices), mask.block_q, mask.block_k
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(dtype).requires_grad_()


def in_dense(values, mask, batch, heads):
    row_blocks, col_blocks = mask.blocks
    patterns = mask.pattern.expand(batch, heads).tolist()
    rows = []
    for b in range(batch):
        for h in range(heads):
            own = values[min(b, values.shape[0] - 1), min(h, values.shape[1] - 1)]
            for i in range(row_blocks):
                row = [values.new_zeros(mask.block_q, mask.block_k)] * col_blocks
                first = patterns[b][h] * row_blocks + i
                for t in range(int(mask.indptr[first]), int(mask.indptr[first + 1])):
                    row[int(mask.indices[t])] = own[t]
                rows.append(torch.cat(row, 1))
    dense = torch.cat(rows).view(batch, heads, row_blocks * mask.block_q, -1)
    return dense[:, :, : mask.q_len, : mask.k_len] + 0.0 * values.sum()


def results(changes, inputs, values, mask, backend="reference", **options):
    out, lse = attention(*inputs, mask, scores=changes, backend=backend, return_lse=True, **options)
    loss = out.double().square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).double().sin().sum()
    found = torch.autograd.grad(loss, (*inputs, values))
    return dict(zip(("out", "lse", "dq", "dk", "dv", "dvalues"), (out, lse, *found), strict=True))


@given(problem=problems(most_tokens=80, head_dims=(8,), value_dims=(8,), blocks=(16, 32), dtypes=(torch.float64,)),
       own=st.tuples(st.booleans(), st.booleans()))  # fmt: skip
def test_it_is_the_dense_bias_with_its_values(problem, own):
    mask = BlockMask.dense(problem.q_len, problem.k_len, block=16) if problem.mask is None else problem.mask
    q, k, v, *_ = problem.tensors()
    values = drawn(mask, problem.batch if own[0] else 1, problem.heads if own[1] else 1, seed=problem.seed)
    dense = scores.bias(in_dense(values, mask, problem.batch, problem.heads))
    wanted = results(dense, (q, k, v), values, mask)
    for backend in ("reference", "blockwise"):
        found = results(scores.tile_bias(values, mask), (q, k, v), values, mask, backend)
        for name, result in found.items():
            torch.testing.assert_close(result, wanted[name], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("dtype", "leading"),
    [(torch.float16, (1, 1)), (torch.float32, (2, 1)), (torch.float16, (1, 3)), (torch.float32, (2, 3))],
)
def test_the_kernels_find_tiles_past_32_columns_in_every_pattern_and_under_lengths(dtype, leading):
    mask = HEADS.with_lengths(q_lengths=[24, 11], k_lengths=[530, 515])
    inputs, values = tensors(mask, 2, 3, 1, dtype), drawn(mask, *leading, dtype=dtype)
    truth = results(
        scores.tile_bias(values.double(), mask), [x.double() for x in inputs], values, mask
    )  # fmt: skip
    plain = results(scores.tile_bias(values, mask), inputs, values, mask)
    found = results(scores.tile_bias(values, mask), inputs, values, mask, "triton")
    compared = testing.compare_results(found, truth, plain)
    assert compared.exact, str(compared)


def test_tiles_are_those_of_the_mask_whatever_is_cheaper():
    mask, inputs = LOCAL, tensors(LOCAL, dtype=torch.float32)
    values = drawn(mask, 1, 2, dtype=torch.float32)
    change = scores.tile_bias(values, mask)
    wanted = results(change, inputs, values, mask, "triton")
    with override(tiling=max):
        assert "gathered" in str(explain(*inputs, mask, capability=(9, 0)))
        found = results(change, inputs, values, mask, "triton")
        said = explain(*inputs, mask, scores=change, capability=(9, 0))
    assert all(torch.equal(found[name], result) for name, result in wanted.items())
    assert {each.walks for each in said.kernels} == {"tiles of 16 x 16: a bias is stored for these tiles"}
    assert said.forward.refusals == (("hopper", "they take fp16 and bf16; got torch.float32"),)


@given(
    masks_of=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    batch=st.integers(1, 3),
    own=st.tuples(st.booleans(), st.booleans()),
)
@example(masks_of=[0, 0, 1], batch=2, own=(False, False))
def test_nobody_writes_where_another_does(masks_of, batch, own):
    patterns = [masks.local(70, window=window, block=16) for window in (5, 30, 60)]
    mask = masks.per_head([patterns[each] for each in masks_of])
    heads, tiles, row_blocks = len(masks_of), len(mask.indices), mask.blocks[0]
    pattern = mask.pattern.expand(batch, heads)
    shape = batch if own[0] else 1, heads if own[1] else 1, tiles
    places = TilePlaces.of(pattern, shape)
    written = []
    for start, p in zip(places.starts.tolist(), pattern.flatten().tolist(), strict=True):
        first, last = (int(mask.indptr[row]) for row in (p * row_blocks, (p + 1) * row_blocks))
        written += range(start + first, start + last)
    assert len(set(written)) == len(written) and max(written) < places.copies * shape[0] * shape[1] * tiles
    for start, b, h in zip(places.starts.tolist(), *(x.flatten().tolist() for x in torch.meshgrid(
        torch.arange(batch), torch.arange(heads), indexing="ij"))):  # fmt: skip
        assert start // tiles % (shape[0] * shape[1]) == (b if own[0] else 0) * shape[1] + (h if own[1] else 0)
    assert {start // (tiles * shape[0] * shape[1]) for start in places.starts.tolist()} == set(range(places.copies))


@pytest.mark.parametrize(
    ("mask", "batch", "leading", "copies", "dtype"),
    [
        (LOCAL, 1, (1, 2), 1, torch.float16),
        (LOCAL, 2, (1, 1), 4, torch.float32),
        (LOCAL, 2, (2, 1), 2, torch.float32),
        (masks.per_head([masks.local(70, window=w, block=16) for w in (5, 30)]), 1, (1, 1), 1, torch.float32),
    ],
    ids=["own", "shared", "shared by heads", "heads with tiles of their own"],
)
def test_only_gradients_of_shared_tiles_are_summed(mask, batch, leading, copies, dtype):
    values, written = drawn(mask, *leading, dtype=torch.float16), []
    summed = tile_bias.summed_copies

    def seen(copies):
        written.append(copies)
        return summed(copies)

    with mock.patch.object(tile_bias, "summed_copies", seen):
        results(scores.tile_bias(values, mask), tensors(mask, batch, dtype=torch.float16), values, mask, "triton")
    (part,) = written
    assert part.shape == (copies, *values.shape) and part.dtype == dtype


def test_values_of_dead_scores_are_not_used_and_get_no_gradient():
    mask = masks.causal(40, block=16)
    inputs, values = tensors(mask, dtype=torch.float32), drawn(mask, 1, 1, dtype=torch.float32)
    live = scores.tile_values(lambda q, k: mask.to_dense()[0, 0][q, k], mask)
    rows = torch.tensor([0, 1, 1, 2, 2, 2]).view(-1, 1, 1)
    live &= rows * 16 + torch.arange(16).view(-1, 1) < 40
    live &= mask.indices.view(-1, 1, 1) * 16 + torch.arange(16) < 40
    dead_are_nan = values.detach().masked_fill(~live, torch.nan).requires_grad_()
    for backend in ("blockwise", "triton"):
        wanted = results(scores.tile_bias(values, mask), inputs, values, mask, backend)
        found = results(scores.tile_bias(dead_are_nan, mask), inputs, dead_are_nan, mask, backend)
        assert all(torch.equal(found[name], result) for name, result in wanted.items())
        assert (found["dvalues"][~live] == 0).all() and (found["dvalues"][live] != 0).any()


# ---------------------------------------------------------------------- tiles


@given(
    layout=st.lists(st.lists(st.booleans(), min_size=70, max_size=70), min_size=1, max_size=3), patterns=st.booleans()
)
@example(layout=[[True] * 70], patterns=True)
@example(layout=[[False] * 31 + [True] * 2 + [False] * 30 + [True] * 2 + [False] * 5], patterns=False)
def test_tiles_are_numbered_as_the_mask_lists_them(layout, patterns):
    whole = torch.tensor(layout)
    mask = BlockMask.from_layout(torch.stack([whole, ~whole]) if patterns else whole, block=16)
    numbers, _ = tile_numbers(mask)
    count = (len(mask.indptr) - 1) // len(layout)
    assert numbers.shape == (count, len(layout), 3, 2)
    for row in range(len(mask.indptr) - 1):
        tiles = torch.arange(int(mask.indptr[row]), int(mask.indptr[row + 1]))
        pattern, i = torch.tensor(row // len(layout)), torch.tensor(row % len(layout))
        assert torch.equal(number_of_tile(numbers, pattern, i, mask.indices[tiles].long()), tiles)


def test_tile_values_of_a_dense_bias_are_the_same_bias_with_its_gradient():
    mask = masks.local(70, 90, window=20, block=(16, 32)).with_lengths(k_lengths=[90, 61])
    inputs = tensors(mask, 2)
    pair = torch.randn(2, 1, 70, 90, dtype=torch.float64, requires_grad=True)
    wanted = results(scores.bias(pair), inputs, pair, mask)
    values = scores.tile_values(lambda q, k: pair[:, :, q, k], mask)
    assert values.shape == (2, 1, len(mask.indices), 16, 32)
    found = results(scores.tile_bias(values, mask), inputs, pair, mask, "blockwise")
    for name, result in found.items():
        torch.testing.assert_close(result, wanted[name])


def test_tile_values_may_be_of_fewer_dimensions_or_shared():
    count = len(LOCAL.indices)
    assert scores.tile_values(lambda q, k: torch.zeros(4, 1, 1, 1), LOCAL).shape == (1, 4, count, 16, 16)
    assert scores.tile_values(lambda q, k: torch.ones(()), LOCAL).shape == (1, 1, count, 16, 16)
    q = scores.tile_values(lambda q, k: q.float(), LOCAL)
    assert q[0, 0, 0, :, 3].tolist() == list(range(16)) and q.max() == 69


# ---------------------------------------------------------------------- which mask


def test_a_mask_with_the_same_tiles_is_taken_and_another_is_refused():
    inputs, values = tensors(LOCAL), drawn(LOCAL, 1, 1)
    change = scores.tile_bias(values, LOCAL)
    wanted = attention(*inputs, LOCAL, scores=change)
    again = masks.local(70, window=20, block=16)
    assert torch.equal(attention(*inputs, again, scores=change), wanted)
    inside = LOCAL.with_lengths([70])
    assert torch.equal(attention(*inputs, inside, scores=change), wanted)
    bits = LOCAL - BlockMask.from_function(lambda q, k: q == k, 70, block=16)
    assert torch.equal(bits.indices, LOCAL.indices) and bits != LOCAL
    dense = scores.bias(in_dense(values, LOCAL, 1, 2))
    torch.testing.assert_close(attention(*inputs, bits, scores=change), attention(*inputs, bits, scores=dense))


@pytest.mark.parametrize("backend", ["reference", "blockwise", "triton"])
@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (None, "tile_bias must be used with the mask that it was made for; got no mask"),
        (masks.causal(70, block=16), "or one with the same live tiles; got one whose live tiles are others"),
        (masks.local(70, window=20, block=32), "its mask has block_q = 16; got 32"),
        (masks.per_head([LOCAL, masks.causal(70, block=16)]), "got one whose live tiles are others"),
    ],
    ids=["none", "other", "blocks", "heads"],
)
def test_another_mask_is_refused(backend, mask, text):
    inputs, values = tensors(LOCAL, dtype=torch.float32), drawn(LOCAL, 1, 1, dtype=torch.float32)
    with pytest.raises(ValueError, match=re.escape(text)):
        attention(*inputs, mask, scores=scores.tile_bias(values, LOCAL), backend=backend)


def test_masks_without_contents_cannot_be_compared():
    values, (one, other) = torch.empty(1, 1, 13, 16, 16, device="meta"), (LOCAL.to("meta") for _ in range(2))
    q = torch.empty(1, 1, 70, 16, device="meta")
    with pytest.raises(ValueError, match="on the meta device, where masks cannot be compared, it must be the same"):
        attention(q, q, q, one, scores=scores.tile_bias(values, other))


CHOSEN = masks.top_k_blocks(torch.rand(5, 5), k=2, q_len=70, block=16)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: scores.tile_bias([1.0], LOCAL), TypeError, "tile_bias must be a tensor of a floating dtype; got list"),
        (lambda: scores.tile_bias(torch.ones(1, 1, 70, 70), LOCAL), ValueError, "Hq or 1, 13, 16, 16]; got [1"),
        (lambda: scores.tile_bias(torch.ones(1, 1, 12, 16, 16), LOCAL), ValueError, "got [1, 1, 12, 16, 16]"),
        (lambda: scores.tile_bias(drawn(LOCAL, 1, 1), torch.ones(70, 70)), TypeError, "mask must be the BlockMask"),
        (lambda: scores.tile_bias(drawn(CHOSEN, 1, 1), CHOSEN), ValueError, "mask must not be dynamic"),
        (lambda: scores.tile_values(3, LOCAL), TypeError, "a function of (q, k) must be given; got int"),
        (lambda: scores.tile_values(lambda q, k: q, None), TypeError, "mask must be a BlockMask; got NoneType"),
        (lambda: scores.tile_values(lambda q, k: 1.0, LOCAL), ValueError, "must return a tensor that broadcasts to"),
        (lambda: scores.tile_values(lambda q, k: q[:2], LOCAL), ValueError, "Hq or 1, 13, 16, 16]; got [2, 16, 1]"),
    ],
)  # fmt: skip
def test_what_cannot_be_made(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()


@pytest.mark.parametrize(
    ("leading", "device", "text"),
    [
        ((1, 3), "cpu", "tile_bias must have shape [B, Hq, tiles, block_q, block_k], here [1, 2, 13, 16, 16] or 1"),
        ((2, 1), "cpu", "got [2, 1, 13, 16, 16]"),
        ((1, 1), "meta", "tile_bias must be on q's device cpu; it is on meta"),
    ],
)
def test_what_does_not_fit(leading, device, text):
    values = torch.ones(*leading, 13, 16, 16, dtype=torch.float64, device=device)
    with pytest.raises(ValueError, match=re.escape(text)):
        attention(*tensors(LOCAL), LOCAL, scores=scores.tile_bias(values, LOCAL))


def test_ranks_take_none():
    plan = distributed.shard(LOCAL, ranks=1)
    q, k, v = tensors(LOCAL)
    with pytest.raises(ValueError, match="scores must be without tile_bias over several ranks"):
        distributed.attention(q, k, v, plan, scores=scores.tile_bias(drawn(LOCAL, 1, 1), LOCAL))


@pytest.mark.parametrize("backend", ["reference", "blockwise", "triton"])
@pytest.mark.parametrize("made_in_inference_mode", [True, False])
def test_what_was_first_used_in_inference_mode_can_be_trained(backend, made_in_inference_mode):
    with torch.inference_mode(made_in_inference_mode):
        mask = masks.local(70, window=20, block=16)
    inputs, values = tensors(mask, dtype=torch.float32), drawn(mask, 1, 1, dtype=torch.float32)
    change = scores.tile_bias(values, mask)
    with torch.inference_mode():
        out = attention(*inputs, mask, scores=change, backend=backend)
    found = results(change, inputs, values, mask, backend)
    assert torch.equal(found["out"], out)


# ---------------------------------------------------------------------- compiled and cached calls


@pytest.mark.parametrize("backend", ["blockwise", "triton"])
def test_values_that_a_compiled_function_gets_compile_without_a_break(backend):
    inputs = tensors(LOCAL, dtype=torch.float32)
    # Dynamo does not guard that an argument and a global are one object.
    values, whole, padded = drawn(LOCAL, 1, 2, dtype=torch.float32), LOCAL, LOCAL.with_lengths([50])

    def run(q, k, v, values, mask):
        out = attention(q, k, v, mask, scores=scores.tile_bias(2 * values, whole), backend=backend)
        return out.square().sum()

    torch._dynamo.reset()
    compiled_run = torch.compile(run, backend="aot_eager", fullgraph=True)
    for mask in (whole, padded):
        eager = torch.autograd.grad(run(*inputs, values, mask), (*inputs, values))
        compiled = torch.autograd.grad(compiled_run(*inputs, values, mask), (*inputs, values))
        for one, other in zip(eager, compiled, strict=True):
            torch.testing.assert_close(one, other)


def test_compiled_code_cannot_compare_masks():
    inputs, values = tensors(LOCAL, dtype=torch.float32), drawn(LOCAL, 1, 2, dtype=torch.float32)
    again = masks.local(70, window=20, block=16)
    torch._dynamo.reset()
    run = torch.compile(attention, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="in compiled code, which cannot compare them, it must be the same object"):
        run(*inputs, again, scores=scores.tile_bias(values, LOCAL))


def test_a_repeat_plans_nothing_and_no_mask_is_taken_for_another():
    few, many = masks.local(40, window=3, block=16), masks.local(40, window=3, block=16).with_lengths([30])
    for mask in (few, many, masks.causal(40, block=16)):
        inputs, values = tensors(mask, dtype=torch.float16), drawn(mask, 1, 2, dtype=torch.float16)
        change = scores.tile_bias(values, mask)
        with mock.patch.object(call_cache, "place_of", return_value=None):
            wanted = results(change, inputs, values, mask, "triton")
        results(change, inputs, values, mask, "triton")
        with mock.patch.object(prepared_call, "setting_of", wraps=prepared_call.setting_of) as plans:
            found = results(change, inputs, values, mask, "triton")
        assert plans.call_count == 0
        assert all(torch.equal(found[name], result) for name, result in wanted.items())
