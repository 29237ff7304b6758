"""Kernels that gather the queries of a block: the same as under a dense mask of these blocks, with the same bits."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash import BlockMask, grouped, selection, testing
from sparseflash.backends import chosen_blocks
from sparseflash.backends.chosen_blocks import block_attention
from sparseflash.backends.triton.selected import block_api, block_lists
from sparseflash.selection import attending
from tests.drawn.counts import examples_times
from tests.drawn.masks import SEEDS
from tests.selection.layers import WIDTH, example_of, filled, sequence

few = examples_times(1 / 2)
HEADS = st.sampled_from(
    [(1, 1, 1, 1), (2, 2, 2, 2), (1, 4, 4, 2), (1, 6, 2, 1), (1, 4, 2, 2), (1, 9, 1, 1), (1, 20, 1, 1)]
)  # B, Hq, that choose, Hkv
SPANS = st.sampled_from([16, 32, 128, 256])


def generator(seed):
    return torch.Generator().manual_seed(seed)


def live_of(index, span, q_heads, k_len, causal):
    """The rule, an entry at a time: bool `[B, Hq, Nq, Nk]`."""
    batch, heads, q_len, _ = index.shape
    live = torch.zeros(batch, heads, q_len, k_len, dtype=torch.bool)
    for b, h, q, n in (index >= 0).nonzero().tolist():
        begin = int(index[b, h, q, n]) * span
        end = min(begin + span, q + k_len - q_len + 1 if causal else k_len)
        live[b, h, q, begin:end] |= end > begin
    return live.repeat_interleave(q_heads // heads, 1)


def drawn(heads, q_len, k_len, dims, span, choices, seed, dtype=torch.float16):
    (batch, q_heads, choosers, kv_heads), g = heads, generator(seed)
    index = torch.randint(-1, -(-k_len // span) + 1, (batch, choosers, q_len, choices), generator=g)
    shapes = [(batch, q_heads, q_len, dims[0]), *[(batch, kv_heads, k_len, dim) for dim in dims]]
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes], index


@few
@given(
    HEADS, st.integers(1, 140), st.integers(1, 200), st.sampled_from([(16, 16), (24, 40), (48, 8)]), SPANS,
    st.integers(1, 5), st.booleans(), SEEDS,
)  # fmt: skip
@example((1, 1, 1, 1), 300, 300, (16, 16), 256, 2, True, 0)  # whole tiles, with and without masks
@example((1, 1, 1, 1), 300, 300, (16, 16), 128, 2, False, 0)  # the last block is not whole
@example((1, 2, 2, 2), 8, 3, (16, 16), 16, 2, True, 2)  # queries before all keys
@example((1, 6, 2, 1), 130, 130, (48, 16), 16, 3, True, 3)  # groups of three heads
@example((1, 4, 1, 1), 40, 70, (16, 16), 32, 2, True, 4)  # the forward by queries, the backward by blocks
@example((1, 9, 1, 1), 40, 300, (16, 16), 128, 2, True, 5)  # by blocks
def test_attention_to_chosen_blocks_is_exact_with_its_gradients(heads, q_len, k_len, dims, span, choices, causal, seed):
    (q, k, v), index = drawn(heads, q_len, k_len, dims, span, choices, seed)
    mask = BlockMask.from_dense(live_of(index, span, heads[1], k_len, causal), block=16)

    def chosen(q, k, v):
        return block_attention(q, k, v, index, span=span, causal=causal, scale=q.shape[-1] ** -0.5)

    testing.assert_exact(chosen, q, k, v, mask)


@pytest.mark.parametrize("scale", [0.0, -0.4])
def test_scales_that_are_not_above_zero(scale):
    (q, k, v), index = drawn((1, 2, 2, 2), 40, 40, (16, 16), 16, 2, 0)
    mask = BlockMask.from_dense(live_of(index, 16, 2, 40, True), block=16)

    def chosen(q, k, v):
        return block_attention(q, k, v, index, span=16, causal=True, scale=scale)

    testing.assert_exact(chosen, q, k, v, mask, scale=scale)


def gradients_of(tensors, index, span=16):
    given = [x.detach().requires_grad_() for x in tensors]
    out, lse = block_attention(*given, index, span=span, causal=True, scale=0.25)
    upstream = torch.randn(out.shape, generator=generator(0)).to(out)
    return out, lse, *torch.autograd.grad(out, given, upstream)


def test_heads_of_a_group_may_be_far_apart():
    (q, k, v), index = drawn((1, 3, 1, 1), 20, 30, (16, 16), 16, 2, 0)
    memory = torch.empty(2 * 2**30 + q[0, 0].numel(), dtype=q.dtype)  # of which little is touched
    far = [memory.as_strided(q.shape, (0, 2**30, 16, 1)), k, v]
    far[0].copy_(q)
    assert all(map(torch.equal, gradients_of((q, k, v), index), gradients_of(far, index)))


@pytest.mark.gpu
def test_a_batch_may_be_of_more_pairs_than_a_grid_has_rows():
    (q, k, v), index = drawn((2**14 + 1, 4, 4, 4), 16, 16, (16, 16), 16, 1, 0)
    results = gradients_of([x.cuda() for x in (q, k, v)], index.cuda())
    some = torch.tensor([0, 2**13, 2**14])
    few = gradients_of([x[some].cuda() for x in (q, k, v)], index[some].cuda())
    assert all(torch.equal(a[some.cuda()], b) for a, b in list(zip(results, few))[:2])
    assert all(x.isfinite().all() and x[-1].any() for x in results[2:])


@few
@given(HEADS, st.integers(1, 60), st.integers(1, 60), SEEDS)
def test_equal_inputs_have_equal_bits_however_many_pairs_are_computed_at_once(heads, q_len, k_len, seed):
    tensors, index = drawn(heads, q_len, k_len, (16, 16), 16, 3, seed)
    first = gradients_of(tensors, index)
    with mock.patch.object(block_api, "_SCRATCH", 4 * 16 * q_len * 3 * (tensors[0].shape[1] // index.shape[1])):
        assert all(map(torch.equal, first, gradients_of(tensors, index)))


@pytest.mark.parametrize("dims", [(16, 16), (16, 40), (40, 16)])
def test_queries_whose_parts_do_not_fit_into_the_scratch_memory_write_none(dims):
    (q, k, v), index = drawn((1, 2, 2, 2), 40, 40, dims, 16, 2, 0)
    mask = BlockMask.from_dense(live_of(index, 16, 2, 40, True), block=16)

    def chosen(q, k, v):
        return block_attention(q, k, v, index, span=16, causal=True, scale=q.shape[-1] ** -0.5)

    with (
        mock.patch.object(block_api, "_SCRATCH", 4 * 20 * 40 * 2),  # 20 channels of the parts of a pair
        mock.patch.object(block_api, "transposed", wraps=block_api.transposed) as lists,
    ):
        testing.assert_exact(chosen, q, k, v, mask)
        lists.reset_mock()
        with torch.no_grad():
            chosen(q, k, v)
    assert lists.called == (dims[1] <= 20)  # the forward by blocks


@given(
    st.integers(1, 2), st.integers(1, 140), st.integers(1, 12), st.integers(1, 5), st.booleans(),
    st.sampled_from([1, 1 << 30]), SEEDS,
)  # fmt: skip
@example(2, 1100, 3, 1, True, 1, 0)  # several groups of queries
@example(2, 30, 100, 3, False, 1 << 30, 0)  # more blocks than a program counts
def test_the_lists_of_blocks_are_in_the_order_of_queries(heads, q_len, blocks, choices, causal, scratch, seed):
    index = torch.randint(-1, blocks + 1, (1, heads, q_len, choices), generator=generator(seed))
    k_len = blocks * 16
    chosen = block_lists.chosen_of(index, blocks, 16, k_len, causal)
    lists = []
    for query, row in enumerate(index.transpose(1, 2)[0].tolist()):
        for h, each in enumerate(row):
            live = [
                b for b in dict.fromkeys(each) if 0 <= b < blocks and not (causal and b * 16 > query + k_len - q_len)
            ]
            lists.append(live)
            assert chosen.blocks[h, query].tolist() == live + [-1] * (choices - len(live))
            assert chosen.counts[h, query] == len(live)
    with mock.patch.object(block_lists, "_SCRATCH", scratch):
        found = block_lists.transposed(chosen, blocks)
    bits, want, ends = block_lists.slot_bits(choices), [], []
    for h in range(heads):
        for block in range(blocks):
            for query, row in enumerate(lists[h::heads]):
                if block in row:
                    want.append(query << bits | row.index(block))
            ends.append(len(want))
    assert found.entries[: len(want)].tolist() == want and found.ends.tolist() == ends


def test_the_bits_of_one_pair_are_bounded():
    chosen = block_lists.chosen_of(torch.zeros(1, 1, 1100, 1, dtype=torch.int32), 500, 1, 500, False)
    with mock.patch.object(block_lists, "_SCRATCH", 8192), mock.patch("torch.empty", wraps=torch.empty) as made:
        block_lists.transposed(chosen, 500)
    assert max(4 * math.prod(call.args) for call in made.call_args_list) == 8192


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")  # of the interpreter
def test_numbers_that_are_none_stay_where_they_are_chosen():
    (q, k, v), index = drawn((1, 2, 2, 2), 64, 64, (16, 16), 16, 2, 0)
    index = index.clamp(0, 2)  # nobody chooses block 3
    index[..., 0] = 0  # all have a key
    q[:, :, 60], k[:, :, 50], v[:, :, 51] = torch.nan, torch.nan, torch.inf
    out, lse, dq, dk, dv = gradients_of((q, k, v), index)
    others = torch.arange(64) != 60
    assert all(x[:, :, others].isfinite().all() for x in (out, lse, dq))
    assert all((x[:, :, 48:] == 0).all() for x in (dk, dv))


@pytest.mark.parametrize(
    ("interpreted", "error", "message"),
    [(True, TypeError, "interpreter silently computes bf16 wrongly"), (False, RuntimeError, "run on NVIDIA GPUs")],
)
def test_kernels_that_cannot_run_here_are_refused(interpreted, error, message):
    layer = filled(selection.MixtureOfBlocks(WIDTH, 4, 2, head_dim=16, block=16, chosen=2, backend="triton"), 0)
    with (
        mock.patch.object(attending, "block_attention", side_effect=block_attention) as gathered,
        mock.patch.object(block_api, "INTERPRETED", interpreted),
        pytest.raises(error, match=message),
    ):
        layer.bfloat16()(sequence(150, 1).bfloat16())
    assert gathered.called


def test_operator():
    (q, k, v), index = drawn((1, 4, 4, 2), 20, 30, (24, 16), 16, 2, 0)
    for requires in (False, True):
        given = [x.clone().requires_grad_(requires) for x in (q, k, v)]
        torch.library.opcheck(torch.ops.sparseflash.block_attention.default, (*given, index, 16, True, 0.25))

    def layer(q, k, v, index):
        return block_attention(q * 1.0, k, v, index, span=16, causal=True, scale=0.25)[0].sin()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for function in (layer, compiled):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        out = function(*given, index)
        results.append((out, *torch.autograd.grad(out.sum(), given)))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("sums", [None, [0, 37, 40, 150]])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_layer_that_gathers_is_the_layer_with_a_mask(kv_heads, sums):
    layer = filled(selection.MixtureOfBlocks(WIDTH, 4, kv_heads, head_dim=16, block=16, chosen=3), 0).half()
    x, results = sequence(150, 1).half(), []
    for backend in ("reference", "triton"):
        layer.backend = backend
        with mock.patch.object(attending, "block_attention", side_effect=block_attention) as gathered:
            out = layer(x, cu_seqlens=sums)
        assert gathered.called == (backend == "triton")
        results.append((out, *torch.autograd.grad(out.float().square().sum(), tuple(layer.parameters()))))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * float(want.detach().abs().max()))


@pytest.mark.parametrize("sums", [None, [0, 37, 40, 150]])
@pytest.mark.parametrize("kind", ["TokenSelection", "SpanSelection"])
def test_single_tokens_are_gathered_or_masked(kind, sums):
    layer, x, results = example_of(kind), sequence(150, 1), []
    for few, called in ((0, True), (1e9, False)):
        with (
            mock.patch.object(attending, "_KEYS", few),
            mock.patch.object(attending, "token_attention", side_effect=attending.token_attention) as gathered,
        ):
            out = layer(x, cu_seqlens=sums)
        assert gathered.called == called
        results.append((out, *torch.autograd.grad(out.square().sum(), (layer.qkv.weight, layer.out.weight))))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want)


@few
@given(
    st.sampled_from([(2, 8, 2), (1, 20, 1), (1, 3, 3)]), st.integers(1, 60), st.integers(1, 100),
    st.sampled_from([(16, 16), (48, 32)]), st.sampled_from([16, 64]), st.integers(1, 4), st.booleans(), SEEDS,
)  # fmt: skip
@example((1, 16, 1), 70, 70, (16, 16), 16, 3, True, 0)  # long lists are cut
def test_selected_attention_gathers_for_the_gradients_of_keys(heads, q_len, k_len, dims, span, choices, causal, seed):
    batch, q_heads, kv_heads = heads
    (q, k, v), index = drawn((batch, q_heads, kv_heads, kv_heads), q_len, k_len, dims, span, choices, seed)
    mask = BlockMask.from_dense(live_of(index, span, q_heads, k_len, causal), block=16)

    def selected(q, k, v):
        return grouped.selected_attention(q, k, v, index, span=span, causal=causal, return_lse=True, backend="triton")

    with (
        mock.patch.object(chosen_blocks, "block_attention", side_effect=block_attention) as gathered,
        mock.patch.object(block_api, "_LONGEST", 64),
    ):
        testing.assert_exact(selected, q, k, v, mask)
    assert gathered.called


def routes(heads, dim, span):
    """Whether the forward and the backward took the kernels by queries."""
    (q, k, v), index = drawn((1, heads, 1, 1), 20, 20, (dim, 16), span, 2, 0)
    kernels = [getattr(block_api, f"{name}_kernel") for name in ("rows_forward", "rows_dq")]
    watched = [mock.MagicMock(wraps=kernel) for kernel in kernels]
    for mocked, kernel in zip(watched, kernels):
        mocked.__getitem__.side_effect = kernel.__getitem__
    with (
        mock.patch.object(block_api, "rows_forward_kernel", watched[0]),
        mock.patch.object(block_api, "rows_dq_kernel", watched[1]),
    ):
        gradients_of((q, k, v), index, span=span)
    return tuple(mocked.__getitem__.called for mocked in watched)


def test_groups_that_fill_a_tile_read_their_own_blocks():
    assert routes(8, 128, 64) == routes(16, 128, 128) == routes(16, 16, 16) == (True, True)
    assert routes(4, 64, 64) == (True, False)
    assert routes(4, 128, 64) == routes(3, 64, 64) == routes(8, 128, 128) == (False, False)


def test_a_profiler_sees_the_kernels_that_run_without_it():
    (q, k, v), index = drawn((1, 4, 2, 2), 40, 40, (16, 16), 16, 2, 0)
    with (
        mock.patch.object(chosen_blocks, "block_attention", side_effect=block_attention) as gathered,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    ):
        grouped.selected_attention(q, k, v, index, span=16, backend="triton")
    assert gathered.called


@pytest.mark.parametrize("wide", ["q", "kv", "v", "qkv"])
def test_autocast_casts_before_it_gathers(wide):
    given, index = drawn((1, 4, 2, 2), 40, 40, (16, 16), 16, 2, 0)
    results = []
    for autocast in (False, True):
        tensors = [x.float() if autocast and name in wide else x for x, name in zip(given, "qkv")]
        tensors = [x.detach().requires_grad_() for x in tensors]
        with (
            mock.patch.object(chosen_blocks, "block_attention", side_effect=block_attention) as gathered,
            torch.autocast("cpu", torch.float16, enabled=autocast),
        ):
            out = grouped.selected_attention(*tensors, index, span=16, backend="triton")
        assert gathered.called
        found = torch.autograd.grad(out.float().square().sum(), tensors)
        assert [x.dtype for x in found] == [x.dtype for x in tensors]
        results.append((out, *[x.half() for x in found]))
    assert all(map(torch.equal, *results))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "dims", "span"), [((64, 4), (192, 128), 64), ((64, 4), (128, 128), 128)])
def test_a_gpu_gathers_for_the_gradients_of_keys(heads, dims, span, dtype):
    (q, k, v), index = drawn((1, *heads, heads[1]), 2000, 2000, dims, span, 8, 0, dtype)
    index[..., 0] = 0  # all choose the first block
    mask = BlockMask.from_dense(live_of(index, span, heads[0], 2000, True), block=16).to("cuda")
    q, k, v, index = q.cuda(), k.cuda(), v.cuda(), index.cuda()

    def selected(q, k, v):
        return grouped.selected_attention(q, k, v, index, span=span, return_lse=True)

    with mock.patch.object(chosen_blocks, "block_attention", side_effect=block_attention) as gathered:
        testing.assert_exact(selected, q, k, v, mask)
    assert gathered.called
    results = []
    for _ in range(2):
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        results.append(torch.autograd.grad(selected(*given)[0].square().sum(), given))
    assert all(map(torch.equal, *results))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "dims", "span", "choices"),
    [((2, 4, 4, 4), (128, 128), 512, 3), ((1, 8, 8, 2), (64, 64), 64, 5), ((1, 32, 2, 2), (192, 128), 64, 16)],
)
def test_a_gpu_is_exact_with_the_same_bits(heads, dims, span, choices, dtype):
    tensors, index = drawn(heads, 1500, 1500, dims, span, choices, 0, dtype)
    mask = BlockMask.from_dense(live_of(index, span, heads[1], 1500, True), block=16).to("cuda")
    (q, k, v), index = (x.cuda() for x in tensors), index.cuda()

    def chosen(q, k, v):
        return block_attention(q, k, v, index, span=span, causal=True, scale=dims[0] ** -0.5)

    testing.assert_exact(chosen, q, k, v, mask)
    results = []
    for _ in range(2):
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = chosen(*given)
        results.append((out, lse, *torch.autograd.grad(out.square().sum(), given)))
    assert all(map(torch.equal, *results))
