import weakref

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash import BlockMask, attention, masks, scores, testing
from sparseflash.backends.problem import Problem
from sparseflash.backends.triton.schedule.plan import plan_of
from sparseflash.grouped import selected_attention
from sparseflash.masks.block_index import mask_of_queries
from sparseflash.scores.change import Sizes
from sparseflash.scores.rows import _functions, in_rows
from tests.drawn.counts import examples_times
from tests.drawn.masks import SEEDS
from tests.watched.waiting import NoWaiting, assert_replays_as_called

few = examples_times(1 / 2)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def live_of(index, group, span, k_len, causal):
    batch, kv_heads, q_len, _ = index.shape
    live = torch.zeros(batch, kv_heads, q_len, k_len, dtype=torch.bool)
    for b, h, q, n in (index >= 0).nonzero().tolist():
        start = int(index[b, h, q, n]) * span
        live[b, h, q, start : start + span] = True
    if causal:
        live &= torch.arange(k_len) <= torch.arange(q_len)[:, None] + (k_len - q_len)
    return live.repeat_interleave(group, 1)


@pytest.mark.parametrize("backend", ["blockwise", "triton"])
@given(
    st.integers(1, 12), st.integers(1, 70), st.sampled_from([(1, 2, 2), (2, 1, 16), (1, 1, 17)]), st.integers(1, 4),
    st.sampled_from([16, 32]), st.booleans(), st.sampled_from([torch.float32, torch.float16]), SEEDS,
)  # fmt: skip
@example(20, 20, (1, 1, 16), 3, 16, True, torch.float32, 0)
def test_attention_over_the_lists_of_queries_is_exact_with_its_gradients(
    backend, q_len, k_len, heads, choices, span, causal, dtype, seed
):
    (batch, kv_heads, group), g = heads, generator(seed)
    index = torch.randint(-1, -(-k_len // span) + 1, (batch, kv_heads, q_len, choices), generator=g)
    shapes = [(batch, kv_heads * group, q_len, 16), *[(batch, kv_heads, k_len, 16)] * 2]
    q, k, v = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    mask = BlockMask.from_dense(live_of(index, group, span, k_len, causal), block=16)

    def selected(q, k, v):
        return selected_attention(q, k, v, index, span=span, causal=causal, return_lse=True, backend=backend)

    testing.assert_exact(selected, q, k, v, mask)


@pytest.mark.parametrize("backend", ["blockwise", "triton"])
@few
@given(
    st.lists(st.integers(0, 19), min_size=1, max_size=3), st.sampled_from([(1, 2, 2), (2, 1, 16)]), st.integers(1, 3),
    st.booleans(), st.booleans(), SEEDS,
)  # fmt: skip
@example([16, 16], (1, 2, 2), 2, True, False, 0)
@example([0, 18, 0], (1, 2, 2), 2, False, True, 0)
def test_packed_sequences_choose_among_their_own_blocks(backend, lengths, heads, choices, causal, on_device, seed):
    (batch, kv_heads, group), g = heads, generator(seed)
    tokens = sum(lengths)
    if not tokens:
        return
    index = torch.randint(-1, 4, (batch, kv_heads, tokens, choices), generator=g)
    live = torch.zeros(batch, kv_heads * group, tokens, tokens, dtype=torch.bool)
    sums = torch.tensor([0, *lengths]).cumsum(0)
    for start, stop in zip(sums[:-1].tolist(), sums[1:].tolist()):
        at = slice(start, stop)
        live[:, :, at, at] = live_of(index[:, :, at], group, 16, stop - start, causal)
    shapes = [(batch, kv_heads * group, tokens, 16), *[(batch, kv_heads, tokens, 16)] * 2]
    q, k, v = (torch.randn(shape, generator=g) for shape in shapes)

    def selected(q, k, v):
        more = {"cu_seqlens": sums.int() if on_device else sums.tolist(), "backend": backend, "return_lse": True}
        return selected_attention(q, k, v, index.int(), span=16, causal=causal, **more)

    testing.assert_exact(selected, q, k, v, BlockMask.from_dense(live, block=16))


@pytest.mark.parametrize(("group", "packed"), [(1, True), (3, False)])
@pytest.mark.parametrize("backend", ["blockwise", "triton"])
def test_score_modifications_are_of_query_heads(group, packed, backend):
    g, heads, sums = generator(0), 2 * group, [0, 5, 22]
    q, k, v = (torch.randn(1, n, 22, 16, generator=g, dtype=torch.float32) for n in (heads, 2, 2))
    index = torch.randint(-1, 3, (1, 2, 22, 2), generator=g)
    parts = [(0, 5), (5, 22)] if packed else [(0, 22)]
    live = torch.zeros(1, heads, 22, 22, dtype=torch.bool)
    for start, stop in parts:
        live[:, :, start:stop, start:stop] = live_of(index[:, :, start:stop], group, 16, stop - start, True)
    shapes = (heads,), (1, heads, 22), (1, 1, 22), (1, heads, 22, 22), (heads,), (1, 1, 22, 1)
    leaves = [x.requires_grad_() for x in (q, k, v, *(torch.rand(shape, generator=g) + 0.5 for shape in shapes))]

    def run(call, *given, **more):
        q, k, v, temperature, of_queries, of_keys, pairs, sink, of_rows = leaves
        kinds = (
            scores.temperature(temperature) + scores.softcap(3.0) + scores.sink(sink) + scores.key_bias(of_keys),
            scores.temperature(of_queries) + scores.bias(pairs),
            scores.bias(of_rows * pairs[:, :1]),
        )
        found = [x for each in kinds for x in call(q, k, v, *given, scores=each, return_lse=True, **more)]
        dead = ~live.any(-1)
        found[1::2] = [x.masked_fill(dead, 0) for x in found[1::2]]
        return [*found, *torch.autograd.grad(sum(x.square().sum() for x in found), leaves)]

    options = {"span": 16, "backend": backend} | ({"cu_seqlens": sums} if packed else {})
    got = run(selected_attention, index, **options)
    want = run(attention, BlockMask.from_dense(live, block=16), backend="reference")
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)


def by_head(score, b, h, q, k, gain, shift):
    return torch.where(q % 3 == 1, score * gain[h], score) + shift[h, (k - q).clamp(-2, 2) + 2] * score.sigmoid()


def own_derivative(score, b, h, q, k, *tensors):
    return 1 - torch.tanh(score / 3).square()


@pytest.mark.parametrize(("group", "packed"), [(1, False), (3, True), (16, False)])
@pytest.mark.parametrize("backend", ["blockwise", "triton"])
def test_modifications_by_head_and_position_are_of_query_heads(group, packed, backend):
    g, heads, sums = generator(0), 2 * group, [0, 5, 22]
    q_len = 22 if packed else 13
    q, k, v = (torch.randn(1, *n, 16, generator=g) for n in ((heads, q_len), (2, 22), (2, 22)))
    index = torch.randint(-1, 3, (1, 2, q_len, 2), generator=g)
    live = torch.zeros(1, heads, q_len, 22, dtype=torch.bool)
    for start, stop in [(0, 5), (5, 22)] if packed else [(0, 22)]:
        own = index[:, :, start:stop]
        live[:, :, start : min(stop, q_len), start:stop] = live_of(own, group, 16, stop - start, True)
    shapes = (heads,), (heads, 8), (heads, 5), (1, 1, 22)
    leaves = [x.requires_grad_() for x in (q, k, v, *(torch.rand(shape, generator=g) / 2 for shape in shapes))]

    def run(call, *given, **more):
        q, k, v, slopes, table, shift, of_keys = leaves
        relative = scores.relative(table, scores.t5_buckets(8, 20))
        kinds = (
            scores.alibi(slopes) + scores.softcap(3.0) + scores.key_bias(of_keys) + scores.sink(slopes),
            scores.log_decay(slopes) + relative + scores.function(by_head, slopes, shift),
            relative + scores.function(lambda score, *_: 3 * torch.tanh(score / 3), derivative=own_derivative),
        )
        found = [x for each in kinds for x in call(q, k, v, *given, scores=each, return_lse=True, **more)]
        dead = ~live.any(-1)
        found[1::2] = [x.masked_fill(dead, 0) for x in found[1::2]]
        return [*found, *torch.autograd.grad(sum(x.square().sum() for x in found), leaves)]

    options = {"span": 16, "backend": backend} | ({"cu_seqlens": sums} if packed else {})
    got = run(selected_attention, index, **options)
    want = run(attention, BlockMask.from_dense(live, block=16), backend="reference")
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)


def test_functions_of_rows_are_recorded_once():
    q, k = (torch.randn(1, n, 10, 16, generator=generator(0)) for n in (4, 2))
    change = scores.function(lambda score, b, h, q, k, gain: score * gain[h], torch.ones(4)) + scores.alibi(
        torch.ones(4)
    )
    made = [in_rows(change, Sizes(1, 4, 10, 10, q.device), 2, 16, lambda x: x)[0].changes[0] for _ in range(2)]
    assert made[0].identity is made[1].identity and made[0].kind == "function"
    want = selected_attention(q, k, k, INDEX[:, :, :1], scores=change, backend="triton")

    def run(q, k):
        return selected_attention(q, k, k, INDEX[:, :, :1], scores=change, backend="triton")

    compiled = torch.compile(run, backend="eager")
    assert torch.equal(compiled(q, k), want)
    known = len(_functions)
    compiled(q, k)
    assert len(_functions) == known


def test_functions_of_rows_do_not_keep_tensors():
    q, k = (torch.randn(1, n, 10, 16, generator=generator(0)) for n in (4, 2))

    def called():
        table = torch.randn(1, 4, 10, 10, generator=generator(1))
        change = scores.function(lambda score, b, h, q, k, table: score + table[b, h, q, k], table)
        selected_attention(q, k, k, INDEX[:, :, :1], scores=change, backend="blockwise")
        return weakref.ref(table)

    assert called()() is None


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: scores.tile_bias(torch.zeros(1, 1, 1, 16, 16), BlockMask.dense(10, block=16)), "tile_bias, which has"),
        (lambda: scores.function(lambda s, *_: s, kernel=print), "a function with kernel=, which knows no rows of"),
    ],
)
def test_modifications_that_know_no_rows_are_refused(made, words):
    q, k = torch.zeros(1, 4, 10, 16), torch.zeros(1, 2, 10, 16)
    with pytest.raises(ValueError, match=f"scores of selected_attention must not be {words}"):
        selected_attention(q, k, k, INDEX[:, :, :1], scores=made())


def test_a_key_bias_of_heads_that_share_keys_is_refused():
    q, k = torch.zeros(1, 4, 10, 16), torch.zeros(1, 2, 10, 16)
    with pytest.raises(ValueError, match="must not be a key_bias for each query head of a group that shares its keys"):
        selected_attention(q, k, k, INDEX[:, :, :1], scores=scores.key_bias(torch.zeros(1, 4, 10)))


def test_packed_sequences_compile():
    g = generator(0)
    q, k, v = (torch.randn(1, heads, 50, 16, generator=g) for heads in (4, 2, 2))
    index, sums = torch.randint(-1, 3, (2, 50, 2), generator=g), torch.tensor([0, 13, 50])

    def run(q, sums):
        return selected_attention(q, k, v, index, span=16, cu_seqlens=sums)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for each in (sums, torch.tensor([0, 40, 50])):
        torch.testing.assert_close(compiled(q, each), run(q, each))


@pytest.mark.parametrize("group", [255, 256])
def test_a_group_has_up_to_256_heads(group):
    g = generator(0)
    q, k, v = (torch.randn(1, heads, n, 16, generator=g) for heads, n in ((group, 3), (1, 40), (1, 40)))
    index = torch.tensor([[[2], [0], [1]]])
    mask = BlockMask.from_dense(live_of(index[None], group, 16, 40, False), block=16)
    testing.assert_exact(
        lambda q, k, v: selected_attention(q, k, v, index, span=16, causal=False, return_lse=True), q, k, v, mask
    )


@given(st.integers(1, 70), st.integers(0, 30), st.sampled_from([16, 32]), st.booleans(), SEEDS)
def test_the_mask_has_a_block_row_for_each_query(q_len, cache, span, causal, seed):
    k_len = q_len + cache
    index = torch.randint(-1, -(-k_len // span) + 1, (1, 2, q_len, 3), generator=generator(seed))
    mask = mask_of_queries(index, 16, span, k_len, causal)
    mask.validate()
    assert torch.equal(mask.to_dense()[:, :, ::16], live_of(index, 1, span, k_len, causal))
    assert torch.equal(mask.to_dense()[:, :, 15::16], mask.to_dense()[:, :, ::16])
    same = masks.selected_keys(index, k_len=k_len, block=16, span=span, causal=causal)
    assert torch.equal(same.to_dense(), mask.to_dense()[:, :, ::16])


def test_choosing_and_planning_wait_for_nothing():
    index = torch.randint(-1, 3, (1, 2, 40, 3), generator=generator(0))
    mask_of_queries(index, 16, 16, 40, True)
    with NoWaiting():
        mask = mask_of_queries(index, 16, 16, 40, True)
        plan = plan_of(Problem.of(mask, scale=1.0), (1, 2), 2, (640, 40))
        plan.worklist(0, 16), plan.worklist(1, 16)


Q, K = torch.zeros(2, 4, 10, 16), torch.zeros(2, 2, 10, 16)
INDEX = torch.zeros(2, 10, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"index": INDEX.float()}, TypeError, r"index must be an integer tensor; got torch\.float32"),
        ({"index": [[0]]}, TypeError, r"index must be an integer tensor; got list"),
        (
            {"index": INDEX[:, :9]},
            ValueError,
            r"index must have shape \[2, 10, K\] or \[2, 2, 10, K\]; got \[2, 9",
        ),
        ({"index": INDEX.expand(3, 2, 10, 3)}, ValueError, r"index must have shape .*; got \[3, 2, 10, 3\]"),
        ({"index": INDEX.to("meta")}, ValueError, r"index must be on q's device cpu; got meta"),
        ({"span": 64.0}, TypeError, r"span must be an integer number of tokens; got 64\.0"),
        ({"span": 48}, ValueError, r"span must be one of 16, 32, 64, 128, 256; got 48"),
        ({"causal": 1}, TypeError, r"causal must be True or False; got 1"),
        (
            {"cu_seqlens": [0, 9]},
            ValueError,
            r"cu_seqlens must be running sums from 0 to the number of tokens, 10, that",
        ),
        ({"cu_seqlens": [0, 6, 4, 10]}, ValueError, r"that do not decrease; got \[0, 6, 4, 10\]"),
        ({"cu_seqlens": torch.zeros(2, 2).long()}, ValueError, r"cu_seqlens must have one dimension; got \[2, 2\]"),
        ({"cu_seqlens": [0.5]}, TypeError, r"cu_seqlens must be a list of integers; got torch\.float32"),
        (
            {"cu_seqlens": [0, 9], "k": K[:, :, :9], "v": K[:, :, :9]},
            ValueError,
            r"q and k must have the same tokens with",
        ),
        ({"q": torch.zeros(2, 514, 10, 16)}, ValueError, r"groups must be of at most 256 query heads; got 257"),
    ],
)
def test_what_is_refused_and_why(arguments, error, message):
    with pytest.raises(error, match=message):
        selected_attention(**({"q": Q, "k": K, "v": K, "index": INDEX} | arguments))


@pytest.mark.gpu
def test_a_graph_of_nsa_is_replayed_with_other_choices():
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, h, 1024, 64, generator=g, device="cuda").half().requires_grad_() for h in (32, 2, 2))
    index = torch.randint(-1, 16, (1, 2, 1024, 4), generator=g, device="cuda", dtype=torch.int32)

    def step():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]  # autograd keeps the stream of a leaf's first use
        out = selected_attention(*leaves, index)
        return out, *torch.autograd.grad(out.float().square().sum(), leaves)

    chosen = (torch.randint(-1, 16, index.shape, generator=generator(seed)) for seed in range(3))
    assert_replays_as_called(step, index.copy_, chosen)
    mask = masks.selected_keys(index, k_len=1024, block=64, span=64, causal=True, group=16)
    testing.assert_exact(lambda q, k, v: selected_attention(q, k, v, index, return_lse=True), q, k, v, mask)


@pytest.mark.parametrize("backend", ["reference", "blockwise", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("batch", "q_len", "k_len"), [(0, 10, 10), (2, 0, 10), (2, 10, 0)])
def test_no_batch_queries_or_keys_give_zeros_with_gradients(backend, dtype, batch, q_len, k_len):
    shapes = (batch, 4, q_len, 16), *[(batch, 2, k_len, 16)] * 2
    q, k, v = (torch.ones(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    index = torch.zeros(2, q_len, 3, dtype=torch.int64)
    out, lse = selected_attention(q, k, v, index, span=16, causal=False, return_lse=True, backend=backend)
    assert out.shape == q.shape and not out.any() and (lse == -torch.inf).all()
    for gradient, x in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
        assert gradient.shape == x.shape and not gradient.any()


@pytest.mark.parametrize("sums", [[0], [0, 0], torch.zeros(1, dtype=torch.int32)], ids=str)
def test_no_sequences_give_nothing(sums):  # a rank's last batch
    q, k = torch.ones(1, 4, 0, 16, requires_grad=True), torch.ones(1, 2, 0, 16)
    out, lse = selected_attention(q, k, k, torch.zeros(2, 0, 3, dtype=torch.int32), cu_seqlens=sums, return_lse=True)
    out.sum().backward()
    assert out.shape == q.grad.shape == q.shape and lse.shape == (1, 4, 0)


def test_lists_of_no_block_choose_nothing():
    q, k = torch.randn(2, 4, 20, 16, requires_grad=True), torch.randn(2, 2, 20, 16, requires_grad=True)
    for shape in ((2, 20, 0), (2, 2, 20, 0)):
        index = torch.zeros(shape, dtype=torch.int64)
        out, lse = selected_attention(q, k, k, index, return_lse=True)
        assert (out == 0).all() and (lse == -torch.inf).all() and out.shape == q.shape
        assert all((each == 0).all() for each in torch.autograd.grad(out.sum(), (q, k)))


def test_gradients_of_gradients_are_refused_by_kernels():
    index = torch.zeros(2, 20, 1, dtype=torch.int64)
    q, k = torch.randn(1, 4, 20, 16).half().requires_grad_(), torch.randn(1, 2, 20, 16).half().requires_grad_()
    out = selected_attention(q, k, k, index, span=16, backend="triton")
    first = torch.autograd.grad(out.sum(), (q, k), create_graph=True)
    # Beside another loss, and with inputs, so that nothing but the refusal tells that a part is missing.
    with pytest.raises(NotImplementedError, match="gradients of gradients are not implemented by the triton backend"):
        torch.autograd.grad(first[1].sum() + q.sum() + k.sum(), (q, k))
