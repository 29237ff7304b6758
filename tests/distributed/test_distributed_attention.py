from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from sparseflash import BlockMask, attention, distributed, dropout, masks, scores, testing
from sparseflash.distributed import symmetric_memory
from sparseflash.distributed.collectives import Collectives
from sparseflash.distributed.peer_copies import PeerCopies
from tests.compared.scored import ALMOST_ALL_WEIGHT_ON_ONE_KEY, FUNCTIONS, SHARDED, scored
from tests.distributed import sharded_attention
from tests.distributed.sharded_attention import check_dropping, check_scored, check_transports, joined, sharded
from tests.distributed.shared_files import copies_of_files
from tests.drawn.counts import examples_times
from tests.drawn.problems import problems
from tests.processes.pool import Failed, Processes

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def pool():
    with Processes(4) as processes:
        yield processes


def drawn_problems(dtypes=DTYPES, most_heads=4, most_tokens=200, dropouts=(0.0,)):
    return problems(
        most_tokens=most_tokens, head_dims=(16, 24), value_dims=(16, 20), blocks=(16, 32), dtypes=dtypes,
        most_heads=most_heads, dropouts=dropouts,
    )  # fmt: skip


def has_blocks_for(mask, ranks):
    if mask is None:
        return False
    block_q, block_k = mask.block_q, mask.block_k
    if mask.q_len == mask.k_len:
        block_q = block_k = max(block_q, block_k)
    return min(-(-mask.q_len // block_q), -(-mask.k_len // block_k)) >= ranks


def needed_keys(mask, ranks, batch, kv_heads):
    """The least number of (token, key head) pairs that travel, by the dense matrix."""
    plan = distributed.shard(mask, ranks=ranks)
    dense = mask.to_dense().expand(batch, -1, -1, -1)
    group = dense.shape[1] // kv_heads if dense.shape[1] > 1 else 1
    dense = dense.unflatten(1, (-1, group)).any(2).expand(-1, kv_heads, -1, -1)
    count = 0
    for rank in range(ranks):
        read = dense[:, :, plan.queries.positions(rank)].any(2)
        for other in set(range(ranks)) - {rank}:
            held = set(plan.keys.positions(other).tolist())
            for start in range(0, mask.k_len, mask.block_k):
                if start in held:
                    block = read[:, :, start : start + mask.block_k]
                    count += int(block.any(-1).sum()) * block.shape[-1]
    return count


@st.composite
def ways(draw, *strategies):
    strategy = draw(st.sampled_from(strategies))
    options = {"strategy": strategy}
    if strategy != "heads":
        options["transport"] = draw(st.sampled_from(["collective", "peer"]))
    if strategy == "keys":
        options["stages"] = draw(st.none() | st.integers(0, 4))
    return options


@given(problem=drawn_problems(), ranks=st.integers(2, 4), way=ways("keys"))
def test_it_is_as_exact_as_attention_in_one_process(pool, problem, ranks, way):
    mask = problem.mask
    assume(has_blocks_for(mask, ranks))
    q, k, v, dout, dlse = problem.tensors()
    function = sharded(pool, ranks, mask, way, scale=problem.scale)
    testing.assert_exact(function, q, k, v, mask, scale=problem.scale, dout=dout, dlse=dlse)


@pytest.mark.parametrize("transport", ["collective", "peer"])  # they attend after the others, or before them
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_queries_that_attend_apart_are_as_exact(pool, ranks, dtype, transport):
    mask = masks.local(999, window=30, block=16)
    q, k, v = tensors(mask, heads=4, kv_heads=2, dtype=dtype)
    assert distributed.shard(mask, ranks=ranks).stages_for(1, 2, 0).stages[0].queries is not None
    options = {"strategy": "keys", "stages": 0, "transport": transport}
    testing.assert_exact(sharded(pool, ranks, mask, options), q, k, v, mask)


@pytest.mark.parametrize("strategy", ["keys", "queries"])
def test_both_transports_give_the_same_bits(pool, strategy):
    check_transports(pool, 3, strategy)


def attend_to_documents(member, strategy):
    mask = masks.local(64 * member.ranks, window=1, block=64)
    plan = distributed.shard(mask, member.group, strategy=strategy)
    copies = copies_of_files(member.group)
    plan.transport_on = lambda device: copies
    q, k, v = (plan.scatter(x.detach()).requires_grad_() for x in tensors(mask))
    out = distributed.attention(q, k, v, plan)
    torch.autograd.grad(out.sum(), (q, k, v))
    return copies.memory is None and torch.equal(out, attention(q, k, v, masks.local(64, window=1, block=64)))


@pytest.mark.parametrize("strategy", ["keys", "queries"])
def test_peers_exchange_nothing_where_nothing_is_remote(pool, strategy):
    assert pool.run(2, attend_to_documents, strategy) == [True, True]
    assert pool.run(1, attend_to_documents, strategy) == [True]


def gradients_of_gradients(member, strategy):
    plan = sharded_attention.planned(member, masks.causal(64, block=16), {"strategy": strategy, "transport": "peer"})
    x = plan.scatter(tensors(plan.mask)[0].detach()).requires_grad_()
    (gradient,) = torch.autograd.grad(distributed.attention(x, x, x, plan).square().sum(), x, create_graph=True)
    return gradient.detach().isfinite().all().item()


@pytest.mark.parametrize("strategy", ["keys", "queries"])
def test_a_graph_of_the_gradients_may_be_asked_for(pool, strategy):
    assert pool.run(2, gradients_of_gradients, strategy) == [True, True]


def second_gradients(member, strategy, stages, backend):
    """Gradients of a loss that contains gradients: of whole tensors in one process, and of this rank's tokens."""
    mask = masks.causal(64, block=16)
    given = [x.detach().double() for x in tensors(mask)]
    plan = distributed.shard(mask, member.group, strategy=strategy, stages=stages)

    def gradients(function):
        inputs = [x.clone().requires_grad_() for x in given]
        out = function(*inputs)
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first) + out.sum(), inputs)

    def on_ranks(*whole):
        return plan.gather(distributed.attention(*(plan.scatter(x) for x in whole), plan, backend=backend))

    return gradients(on_ranks), gradients(lambda *whole: attention(*whole, mask, backend="reference"))


def test_gradients_of_gradients_where_heads_travel(pool):
    for found, want in pool.run(2, second_gradients, "heads", None, "reference"):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize(
    "strategy, stages, backend, text",
    [
        *[(*way, "reference", "over several ranks where keys or queries travel; distributed.shard")
        for way in (("keys", 0), ("keys", 2), ("queries", None))],
        ("heads", None, "blockwise", "by the blockwise backend; backend='reference' has them."),
    ],
)  # fmt: skip
def test_gradients_of_gradients_are_refused_where_parts_would_lack(strategy, stages, backend, text):
    with Processes(2) as pool, pytest.raises(Failed, match=f"gradients of gradients are not implemented {text}"):
        pool.run(2, second_gradients, strategy, stages, backend)


def test_a_peer_transport_that_is_not_possible_is_refused():
    refused = "transport must be 'collective' or 'auto' here; 'peer' is not possible: the tensors are on cpu"
    with Processes(1) as pool, pytest.raises(Failed, match=refused):
        pool.run(1, attend_with, "peer")


def test_copies_between_peers_refuse_to_be_recorded():
    copies = PeerCopies(0, allocate=None, stream=mock.Mock())
    recording = mock.patch("torch.cuda.is_current_stream_capturing", return_value=True)
    with recording, pytest.raises(RuntimeError, match="transport must be 'collective' to record CUDA graphs"):
        copies.begin(lambda: 128)


def test_a_buffer_that_one_rank_cannot_allocate_is_an_error_on_all():
    failures = mock.patch.object(symmetric_memory, "_gathered", return_value=["", "out of memory"])
    allocated = mock.patch("torch.distributed._symmetric_memory.empty")
    message = "a buffer of 1,024 bytes cannot be allocated on rank 1: out of memory"
    with failures, allocated, pytest.raises(RuntimeError, match=message):
        symmetric_memory.SymmetricMemory(1024, group=None, device=torch.device("cuda", 0))


def test_a_plan_outlives_its_group_with_an_error():
    class Group:
        pass

    collectives = Collectives(Group())  # the only reference to the group
    with pytest.raises(RuntimeError, match="the process group of a plan must exist as long as the plan is used"):
        collectives.start([], message=None)


def attend_with(member, transport):
    plan = distributed.shard(masks.causal(64, block=16), member.group, transport=transport)
    x = plan.scatter(torch.zeros(1, 1, 64, 16))
    distributed.attention(x, x, x, plan)


@given(problem=drawn_problems(), ranks=st.integers(2, 4))
def test_queries_that_travel_are_as_exact(pool, problem, ranks):
    mask = problem.mask
    assume(has_blocks_for(mask, ranks))
    q, k, v, dout, dlse = problem.tensors()
    function = sharded(pool, ranks, mask, {"strategy": "queries"}, scale=problem.scale)
    testing.assert_exact(function, q, k, v, mask, scale=problem.scale, dout=dout, dlse=dlse)


@given(problem=drawn_problems(most_heads=1), ranks=st.integers(2, 4), times=st.integers(1, 2))
@examples_times(1 / 2)
def test_heads_that_travel_are_as_exact(pool, problem, ranks, times):
    mask = problem.mask
    assume(has_blocks_for(mask, ranks))
    heads = ranks * times
    generator = torch.Generator().manual_seed(problem.seed)
    q, k, v = (
        torch.randn(problem.batch, count, length, dim, generator=generator).to(problem.dtype).requires_grad_()
        for count, length, dim in (
            (2 * heads, mask.q_len, problem.dim), (heads, mask.k_len, problem.dim), (heads, mask.k_len, problem.v_dim)
        )
    )  # fmt: skip
    testing.assert_exact(sharded(pool, ranks, mask, {"strategy": "heads"}), q, k, v, mask)


def drawn_scores(*dtypes, kinds=(*SHARDED, *FUNCTIONS), most_heads=4, most_tokens=120):
    return scored(
        kinds=kinds, most_tokens=most_tokens, head_dims=(16,), value_dims=(16,), blocks=(16, 32), dtypes=dtypes,
        most_heads=most_heads, dropouts=(0.0, 0.0, 0.3),
    )  # fmt: skip


@given(
    case=drawn_scores(torch.float32, torch.float64, torch.bfloat16), ranks=st.integers(2, 4),
    way=ways("keys", "queries"),
)  # fmt: skip
def test_changed_scores_are_as_exact(pool, case, ranks, way):
    assume(has_blocks_for(case.problem.mask, ranks))
    check_scored(pool, ranks, case, way)


@given(case=drawn_scores(torch.float32, torch.float64, most_heads=1), ranks=st.integers(2, 4))
@example(case=ALMOST_ALL_WEIGHT_ON_ONE_KEY, ranks=2)
def test_changed_scores_of_heads_that_travel_are_as_exact(pool, case, ranks):
    assume(has_blocks_for(case.problem.mask, ranks) and case.problem.mask.shape[1] == 1)
    case = replace(case, problem=replace(case.problem, heads=2 * ranks, kv_heads=ranks))
    check_scored(pool, ranks, case, {"strategy": "heads"})


@given(case=drawn_scores(torch.float32, kinds=(*SHARDED, "function of scores"), most_tokens=80))
@examples_times(1 / 4)
def test_kernels_take_positions_in_the_whole_sequence(pool, case):
    assume(has_blocks_for(case.problem.mask, 2))
    check_scored(pool, 2, case, {"strategy": "keys"}, backend="triton")


# ---------------------------------------------------------------------- dropout


@given(
    problem=drawn_problems(dropouts=(0.1, 0.5, 0.9)), ranks=st.integers(2, 4),
    way=ways("keys", "keys", "queries", "heads"),
)  # fmt: skip
def test_dropout_is_that_of_one_process(pool, problem, ranks, way):
    assume(has_blocks_for(problem.mask, ranks))
    if way["strategy"] == "heads":
        assume(problem.mask.shape[1] == 1)
        problem = replace(problem, heads=2 * ranks, kv_heads=ranks)
    check_dropping(pool, ranks, problem, way)


@given(problem=drawn_problems((torch.float32, torch.float16), 2, 70, dropouts=(0.3,)), queries=st.booleans())
@examples_times(1 / 4)
def test_kernels_drop_by_positions_in_the_whole_sequence(pool, problem, queries):
    assume(has_blocks_for(problem.mask, 2))
    check_dropping(pool, 2, problem, {"strategy": "queries" if queries else "keys"}, backend="triton")


@pytest.mark.parametrize("backend", ["blockwise", "triton", "reference"])
@pytest.mark.parametrize("strategy", ["keys", "queries", "heads"])
def test_the_weights_that_one_process_keeps_are_kept(pool, strategy, backend):
    """Each head has its own mask, so that other ranks' keys lie in its slots, and the last block is ragged."""
    mask = masks.per_head([masks.local(70, window=33, block=16), masks.butterfly(70, block=16)] * 2)
    q, k, _ = tensors(mask, heads=4, kv_heads=2, batch=2)
    v = torch.eye(70).expand(2, 2, 70, 70)
    out, _ = sharded(pool, 2, mask, {"strategy": strategy}, dropout_p=0.5, seed=11, backend=backend)(q, k, v)
    plain = attention(q, k, v, mask)
    keep = dropout.keep_mask(11, 0.5, 2, 4, 70, 70)
    assert torch.equal(out != 0, keep & (plain != 0))
    torch.testing.assert_close(out, torch.where(keep, 2 * plain, 0.0), rtol=1e-4, atol=1e-6)


def dropping(member, mask, q, seed, state):
    torch.manual_seed(state)
    plan = distributed.shard(mask, member.group)
    x = plan.scatter(q.detach())
    seed = torch.tensor(seed[0]) if isinstance(seed, tuple) else seed
    return distributed.attention(x, x, x, plan, dropout_p=0.5, seed=seed), torch.rand(1).item()


def test_all_ranks_take_the_seed_that_the_first_one_draws(pool):
    mask = masks.causal(64, block=16)
    q = tensors(mask)[0]
    torch.manual_seed(3)
    seed = int(dropout.seed_tensor(None, q.device))
    drawn_next = torch.rand(1).item()
    whole, _ = zip(*pool.each(3, dropping, [(mask, q, seed, state) for state in range(3)]), strict=True)
    drawn = pool.each(3, dropping, [(mask, q, None, state) for state in (3, 4, 5)])
    in_step = pool.each(3, dropping, [(mask, q, None, 3)] * 3)
    in_tensors = pool.each(3, dropping, [(mask, q, (seed,), 0)] * 3)
    for found in (drawn, in_step, in_tensors):
        assert all(torch.equal(out, expected) for (out, _), expected in zip(found, whole, strict=True))
    assert [after for _, after in in_step] == [drawn_next] * 3
    other, _ = zip(*pool.each(3, dropping, [(mask, q, None, 4)] * 3), strict=True)
    assert not torch.equal(other[0], whole[0])


def tensors(mask, heads=2, kv_heads=None, dim=16, dtype=torch.float32, batch=1):
    generator = torch.Generator().manual_seed(0)
    kv_heads = kv_heads or heads
    sizes = (heads, mask.q_len), (kv_heads, mask.k_len), (kv_heads, mask.k_len)
    return [torch.randn(batch, *size, dim, generator=generator).to(dtype).requires_grad_() for size in sizes]


def per_head():
    return masks.per_head([masks.local(200, window=33, block=16), masks.butterfly(200, block=16)] * 2)


@pytest.mark.parametrize("strategy", ["keys", "queries", "heads"])
def test_heads_of_their_own_patterns(pool, strategy):
    mask = per_head()
    q, k, v = tensors(mask, heads=4, kv_heads=2)
    testing.assert_exact(sharded(pool, 2, mask, {"strategy": strategy}), q, k, v, mask)


@pytest.mark.parametrize("strategy", ["keys", "queries", "heads"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_the_same_bits_every_time(pool, strategy, dropout_p):
    mask = masks.causal(300, block=16)
    q, k, v = tensors(mask, heads=4, dtype=torch.bfloat16)
    results = []
    for _ in range(3):
        out, lse = sharded(pool, 4, mask, {"strategy": strategy}, dropout_p=dropout_p, seed=5)(q, k, v)
        results.append([out, lse, *torch.autograd.grad((out.float() ** 2).sum() + lse.sum(), (q, k, v))])
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


def test_heads_that_travel_give_the_bits_of_one_process(pool):
    mask = masks.causal(300, block=16)
    q, k, v = tensors(mask, heads=2)
    dropped, _ = sharded(pool, 2, mask, {"strategy": "heads"}, dropout_p=0.3, seed=5)(q, k, v)
    assert torch.equal(dropped, attention(q, k, v, mask, dropout_p=0.3, seed=5))
    out, lse = sharded(pool, 2, mask, {"strategy": "heads"})(q, k, v)
    each = [attention(q[:, h : h + 1], k[:, h : h + 1], v[:, h : h + 1], mask, return_lse=True) for h in range(2)]
    assert torch.equal(out, torch.cat([o for o, _ in each], 1))
    assert torch.equal(lse, torch.cat([one_lse for _, one_lse in each], 1))


@given(problem=drawn_problems(dtypes=(torch.float32,)), ranks=st.integers(2, 4), stages=st.integers(0, 4))
@examples_times(1 / 2)
def test_live_remote_keys_travel_and_nothing_else(pool, problem, ranks, stages):
    mask = problem.mask
    assume(has_blocks_for(mask, ranks))
    q, k, v, dout, dlse = problem.tensors()
    needed = needed_keys(mask, ranks, problem.batch, problem.kv_heads)
    size = (problem.dim + problem.v_dim) * 4
    out, lse = sharded(pool, ranks, mask, {"strategy": "keys", "stages": stages})(q, k, v)
    assert sum(total for total, _ in pool.run(ranks, sharded_attention.sent)) == needed * size
    torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    assert sum(total for total, _ in pool.run(ranks, sharded_attention.sent)) == 2 * needed * size
    traffic = distributed.shard(mask, ranks=ranks).traffic(problem.batch, problem.kv_heads)
    assert int(traffic.sent.sum()) == int(traffic.received.sum()) == needed


def test_the_model_counts_the_bytes_of_queries_that_travel(pool):
    mask = BlockMask.dense(64, 800, block=16)
    q, k, v = tensors(mask, heads=4, kv_heads=2)
    sharded(pool, 2, mask, {"strategy": "queries"})(q, k, v)
    chosen = distributed.shard(mask, ranks=2, strategy="queries").chosen(
        distributed.Shape(1, 4, 2, 16, 16, torch.float32)
    )
    bytes_ = sum(total for total, _ in pool.run(2, sharded_attention.sent))
    assert bytes_ == chosen.mean_bytes * 2 == 64 * 4 * (16 + 16 + 1) * 4
    assert bytes_ < needed_keys(mask, 2, 1, 2) * 32 * 4


def test_the_model_counts_the_bytes_of_heads_that_travel(pool):
    mask = masks.causal(130, block=16)
    q, k, v = tensors(mask, heads=8, kv_heads=4)
    plan = distributed.shard(mask, ranks=4, strategy="heads")
    sharded(pool, 4, mask, {"strategy": "heads"})(q, k, v)
    bytes_ = sum(total for total, _ in pool.run(4, sharded_attention.sent))
    lse = 3 * 8 * 130 * 4 / 4  # not part of the model
    assert bytes_ == plan.chosen(distributed.Shape(1, 8, 4, 16, 16, torch.float32)).mean_bytes * 4 + lse


def only_some_gradients(member, mask, tensors, wanted):
    plan = distributed.shard(mask, member.group, strategy="keys", stages=2)
    local = [plan.scatter(x.detach()).requires_grad_(name in wanted) for name, x in zip("qkv", tensors, strict=True)]
    out = distributed.attention(*local, plan)
    if not wanted:
        return out.requires_grad
    first = torch.autograd.grad(out.sum(), [x for x in local if x.requires_grad], retain_graph=True)
    again = torch.autograd.grad(out.sum(), [x for x in local if x.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    return first


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv", ""])
def test_some_inputs_may_need_no_gradient(pool, wanted):
    mask = masks.local(130, window=50, block=16)
    tensors_ = tensors(mask)
    results = pool.run(2, only_some_gradients, mask, tensors_, wanted)
    if not wanted:
        assert results == [False, False]
        return
    inputs = [x for name, x in zip("qkv", tensors_, strict=True) if name in wanted]
    plan = distributed.shard(mask, ranks=2)
    for parts, expected in zip(
        zip(*results, strict=True), torch.autograd.grad(attention(*tensors_, mask).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(joined(parts, plan, "queries"), expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- tokens to ranks and back


def scatter_and_gather(member, mask, x, dim):
    plan = distributed.shard(mask, member.group)
    x = x.requires_grad_(x.is_floating_point())
    local = plan.scatter(x, dim)
    whole = plan.gather(local, dim)
    if not x.is_floating_point():
        return local, whole, None, plan.positions
    weight = torch.arange(whole.numel(), dtype=x.dtype).view(whole.shape)
    (gradient,) = torch.autograd.grad((whole * weight).sum(), x)
    return local.detach(), whole.detach(), gradient, plan.positions


@pytest.mark.parametrize(
    ("x", "dim"),
    [
        (torch.randn(2, 3, 90, 4), -2),
        (torch.randn(2, 90, 4, dtype=torch.float64), 1),
        (torch.arange(180).view(2, 90), -1),
        (torch.randn(1, 90), -1),  # the dimension of one batch element may have any stride
        (torch.randn(90).to(torch.bfloat16) > 0, 0),
    ],
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_tokens_go_to_their_ranks_and_back(pool, x, dim, ranks):
    for local, whole, gradient, positions in pool.run(ranks, scatter_and_gather, masks.causal(90, block=16), x, dim):
        assert torch.equal(local, x.index_select(dim, positions))
        assert torch.equal(whole, x)
        if gradient is not None:
            assert torch.equal(gradient, torch.arange(x.numel(), dtype=x.dtype).view(x.shape))


# ---------------------------------------------------------------------- what is refused


def attend(member, mask, q_shape, dtype, scale, changes=None, dropout_p=0.0, seed=None):
    plan = distributed.shard(mask, member.group)
    q = plan.scatter(torch.zeros(q_shape, dtype=dtype))
    return distributed.attention(q, q, q, plan, scale=scale, scores=changes, dropout_p=dropout_p, seed=seed)


SAME = masks.causal(64, block=16), (1, 2, 64, 16), torch.float32, 1.0


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ((masks.local(64, window=9, block=16), *SAME[1:]), "mask"),
        ((SAME[0], (1, 4, 64, 16), *SAME[2:]), "shapes"),
        ((*SAME[:2], torch.float64, 1.0), "dtype"),
        ((*SAME[:3], 0.5), "strategy, stages, transport, scale, backend"),
        ((*SAME, scores.softcap(5.0)), "scores"),
    ],
)
def test_ranks_that_disagree_all_raise(pool, other, named):
    check_disagreement(pool, SAME, other, named)


@pytest.mark.parametrize(
    ("ours", "other", "named"),
    [
        ((0.5, 7), (0.25, 7), "dropout_p"),
        ((0.5, 7), (0.5, 8), "seed"),
        ((0.5, 7), (0.5, None), "seed"),
        ((0.5, torch.tensor(7)), (0.5, 7), "seed"),
        ((0.5, 7), (0.0, 7), "dropout_p, seed"),
    ],
)
def test_ranks_that_disagree_about_dropout_all_raise(pool, ours, other, named):
    check_disagreement(pool, (*SAME, None, *ours), (*SAME, None, *other), named)


def check_disagreement(pool, ours, other, named):
    results = pool.each(3, attend, [ours, other, ours])
    for result in results:
        assert isinstance(result, Failed)
        assert result.kind == "ValueError"
        assert "all ranks must call attention with the same mask, shapes and options" in result.message
        assert f"they differ in {named} between the ranks [0, 2] and [1]" in result.message
    pool.run(3, attend, *ours)


def wait_for_the_others(member, mask):
    member.kept["plan"] = distributed.shard(mask, member.group)
    return True


def attend_or_die(member, q_shape, dies):
    plan = member.kept["plan"]
    q = plan.scatter(torch.zeros(q_shape))
    distributed.attention(q, q, q, plan)
    if dies:
        import os

        os._exit(1)
    distributed.attention(q, q, q, plan)


def test_ranks_do_not_hang_when_one_dies():
    with Processes(2, timeout=20) as pool:
        pool.run(2, wait_for_the_others, SAME[0])
        for pipe, dies in zip(pool.pipes, (False, True), strict=True):
            pool.send(pipe, 2, attend_or_die, ((1, 2, 64, 16), dies))
        assert pool.pipes[0].poll(timedelta(seconds=40).total_seconds())
        result = pool.receive(pool.pipes[0])
        assert isinstance(result, Failed)
        assert result.kind == "RuntimeError"


def refused(match, error=ValueError):
    return pytest.raises(error, match=match)


def test_a_group_that_is_too_large_for_the_tokens_is_refused():
    with refused(r"of queries for each of the 5 ranks; got 4 blocks of 16 tokens\. Use a smaller group\.$"):
        distributed.shard(SAME[0], ranks=5)
    with refused(r"at least one block of keys for each of the 3 ranks; got 2 blocks of 32 .* mask\.reblock\(16\)\.$"):
        distributed.shard(BlockMask.dense(128, 64, block=32), ranks=3)


def test_arguments_of_shard_are_checked():
    mask = SAME[0]
    with refused("mask must be a sparseflash BlockMask; got", TypeError):
        distributed.shard(torch.ones(4, 4))
    with refused("torch.distributed must be initialised before"):
        distributed.shard(mask)
    with refused("ranks must be at least 1; got 0"):
        distributed.shard(mask, ranks=0)
    with refused("rank must lie in 0..1; got 2"):
        distributed.shard(mask, ranks=2, rank=2)
    with refused("stages must be 0 to 4, or None; got 5"):
        distributed.shard(mask, ranks=2, stages=5)
    for name, value in (("ranks", 2.0), ("rank", True), ("stages", 2.5)):
        with refused(f"{name} must be an integer.*; got {value}", TypeError):
            distributed.shard(mask, **{"ranks": 2, name: value})
    with refused("like must be a ShardPlan, made by distributed.shard.*; got Assignment", TypeError):
        distributed.shard(mask, ranks=2, like=distributed.shard(mask, ranks=2).assignment)
    with refused("transport must be one of 'auto', 'collective', 'peer'; got 'ring'"):
        distributed.shard(mask, ranks=2, transport="ring")
    with refused("transport must be 'collective' or 'auto' with strategy='heads', .* collectives; got 'peer'"):
        distributed.shard(mask, ranks=2, strategy="heads", transport="peer")
    for strategy in ("queries", "heads"):
        with refused(f"stages must be None with strategy='{strategy}', because keys alone travel in stages; got 0"):
            distributed.shard(mask, ranks=2, strategy=strategy, stages=0)
    with refused("strategy must be one of 'auto', 'keys', 'queries', 'heads'; got 'ring'"):
        distributed.shard(mask, ranks=2, strategy="ring")
    plan = distributed.shard(mask, ranks=2)
    with refused("like must be a plan of the same lengths and ranks; it is of 64 x 64 tokens over 2 ranks, got 65"):
        distributed.shard(masks.causal(65, block=16), ranks=2, like=plan)
    with refused("mask must have a block_q that divides the chunks of like, 16 tokens; got 32. Use mask.reblock"):
        distributed.shard(masks.causal(64, block=32), ranks=2, like=plan)


def test_arguments_of_the_plan_are_checked():
    plan = distributed.shard(SAME[0], ranks=2)
    with refused("side must be 'queries' or 'keys'; got 'values'"):
        plan.scatter(torch.zeros(64, 1), side="values")
    with refused("x must have 64 tokens, the whole sequence, in dimension -2; got shape"):
        plan.scatter(torch.zeros(32, 1))
    with refused("x must have 32 tokens, this rank's share, in dimension -2; got shape"):
        plan.gather(torch.zeros(64, 1))
    with refused("plan must be of a process group to exchange anything; it was made with ranks="):
        plan.gather(torch.zeros(32, 1))
    with refused("kv_heads must divide the 4 heads of the mask; got 3"):
        distributed.shard(per_head(), ranks=2).explain(kv_heads=3)
    heads = distributed.shard(SAME[0], ranks=2, strategy="heads")
    with refused(
        "strategy must be 'keys', 'queries' or 'auto' for this call, as heads cannot be shared out: 3 key heads are "
        r"not a multiple of 2 ranks; got 'heads'. Pass it to distributed.shard\(mask, strategy='auto'\).$"
    ):
        heads.chosen(distributed.Shape(1, 3, 3, 16, 16, torch.float32))


def test_arguments_of_attention_are_checked():
    plan = distributed.shard(
        masks.per_batch([masks.causal(64, block=16), masks.local(64, window=5, block=16)]), ranks=2
    )
    x = torch.zeros(2, 2, 32, 16)
    with refused("plan must be a ShardPlan, made by distributed.shard", TypeError):
        distributed.attention(x, x, x, plan.mask)
    with refused("scores.function must be given without kernel= over several ranks"):
        own = scores.function(lambda score, *_: score, kernel=lambda score, *_: score)
        distributed.attention(x, x, x, plan, scores=own)
    with refused("slopes must have one entry for each of the 2 query heads; got 3"):
        distributed.attention(x, x, x, plan, scores=scores.alibi(torch.ones(3)))
    with refused("dropout_p must be at least 0 and below 1; got 1.5"):
        distributed.attention(x, x, x, plan, dropout_p=1.5)
    with refused("seed must be an int, a tensor or None; got float", TypeError):
        distributed.attention(x, x, x, plan, dropout_p=0.1, seed=0.5)
    with refused("q, k and v must have one dtype", TypeError):
        distributed.attention(x, x.double(), x, plan)
    whole = torch.zeros(2, 2, 64, 16)
    with refused(r"q must hold the 32 tokens of rank 0 of 2; got 64. It looks whole: pass plan.scatter\(q\)"):
        distributed.attention(whole, whole, whole, plan)
    with refused("mask must be for 1 or 3 batch elements, as q has; it is for 2"):
        three = torch.zeros(3, 2, 32, 16)
        distributed.attention(three, three, three, plan)
    of_heads = distributed.shard(per_head(), ranks=2)
    with refused("mask must be for 1 or 2 heads, as q has; it is for 4"):
        some = torch.zeros(1, 2, of_heads.queries.counts[0], 16)
        distributed.attention(some, some, some, of_heads)
    with refused("plan must be of a process group"):
        distributed.attention(x, x, x, plan)
