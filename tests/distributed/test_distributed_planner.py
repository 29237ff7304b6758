import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sparseflash import BlockMask, distributed, masks
from sparseflash.distributed import costs, planner
from sparseflash.distributed.positions import Positions
from sparseflash.distributed.shards import Shards
from tests.drawn.masks import block_masks


def blocks_of(mask):
    if mask.q_len == mask.k_len:
        return -(-mask.q_len // max(mask.block_q, mask.block_k))
    return min(mask.blocks)


@given(mask=block_masks(most_tokens=400, blocks=(16, 32), batch=2, heads=2), ranks=st.integers(1, 6))
def test_every_token_lies_on_one_rank_and_counts_are_equal_up_to_a_chunk(mask, ranks):
    assume(blocks_of(mask) >= ranks)
    plans = [distributed.shard(mask, ranks=ranks, rank=rank) for rank in range(ranks)]
    for side, length in (("queries", mask.q_len), ("keys", mask.k_len)):
        shards = getattr(plans[0], side)
        assert np.ptp(np.bincount(shards.rank_of_chunk, minlength=ranks)) <= 1
        positions = [shards.positions(rank) for rank in range(ranks)]
        assert [len(some) for some in positions] == shards.counts
        assert torch.equal(torch.cat(positions), shards.order)
        assert torch.equal(shards.order.sort()[0], torch.arange(length))
        assert shards.is_contiguous == torch.equal(shards.order, torch.arange(length))
        assert torch.equal(shards.in_sequence(shards.order, 0), torch.arange(length))
        assert torch.equal(shards.by_rank(torch.arange(length), 0), shards.order)
    assert len({plan.assignment.digest for plan in plans}) == 1
    assert all(torch.equal(plan.positions, plans[0].queries.positions(plan.rank)) for plan in plans)
    if mask.q_len == mask.k_len:
        assert plans[0].queries is plans[0].keys


@given(mask=block_masks(most_tokens=300, blocks=(16, 32), batch=2, heads=2), ranks=st.integers(2, 4))
def test_loads_and_traffic_are_those_of_the_mask(mask, ranks):
    assume(blocks_of(mask) >= ranks)
    plan = distributed.shard(mask, ranks=ranks)
    layout = plan.mask.to_layout().expand(2, 2, -1, -1).double().mean((0, 1))
    q_rank = plan.queries.rank_of_block(mask.block_q)
    k_rank = plan.keys.rank_of_block(mask.block_k)
    for rank in range(ranks):
        rows = layout[torch.from_numpy(q_rank == rank)].sum(0) * mask.block_q * mask.block_k
        assert float(rows[torch.from_numpy(k_rank == rank)].sum()) == pytest.approx(plan.loads.local[rank])
        assert float(rows[torch.from_numpy(k_rank != rank)].sum()) == pytest.approx(plan.loads.remote[rank])
    if plan.mask.pattern.numel() == 1:
        far = (layout > 0) & torch.from_numpy(q_rank[:, None] != k_rank)
        waiting = layout.sum(1) * far.any(1) * mask.block_q * mask.block_k
        for rank in range(ranks):
            assert float(waiting[torch.from_numpy(q_rank == rank)].sum()) == pytest.approx(plan.loads.waiting[rank])


@given(
    mask=block_masks(most_tokens=300, blocks=(16, 32), batch=2, heads=2),
    ranks=st.integers(1, 4),
    stages=st.integers(0, 3),
)
def test_groups_of_16_keys_stay_together(mask, ranks, stages):
    """Dropout relies on it."""
    assume(blocks_of(mask) >= ranks)
    cpu = torch.device("cpu")
    for rank in range(ranks):
        plan = distributed.shard(mask, ranks=ranks, rank=rank)
        own = plan.positions_of("keys")
        slots = [stage.positions for stage in plan.stages_for(2, 2, stages, same_slots=True).stages]
        assert stages == 0 or torch.equal(slots[0].tokens, own.tokens)
        for positions in (own, *slots):
            each = positions.groups_on(cpu).repeat_interleave(16)[: len(positions.tokens)]
            assert torch.equal(each * 16 + torch.arange(len(each)) % 16, positions.tokens)
            assert positions.on(cpu).max() < mask.k_len
        queries = plan.query_stages_for(2, 2, same_slots=True).stages[1].positions
        assert torch.equal(queries.queries_on(cpu), queries.tokens) and queries.on(cpu).max() < mask.q_len


def test_keys_in_other_groups_are_a_mistake_of_ours():
    for tokens in (torch.arange(8, 40), torch.tensor([0, 2, 1]), torch.tensor([3])):
        with pytest.raises(RuntimeError, match="keys must lie in groups of 16 that are groups of the whole sequence"):
            Positions(tokens, 64).groups_on(torch.device("cpu"))


@given(
    mask=block_masks(most_tokens=300, blocks=(16, 32), batch=2, heads=2),
    ranks=st.integers(1, 4),
    stages=st.integers(1, 3),
)
def test_the_masks_of_all_stages_have_the_live_scores_of_the_whole(mask, ranks, stages):
    assume(blocks_of(mask) >= ranks)
    live = 0
    for rank in range(ranks):
        plan = distributed.shard(mask, ranks=ranks, rank=rank)
        for stage in plan.stages_for(2, 2, stages).stages:
            stage.mask.validate()
            live += int(stage.mask.to_dense().expand(2, 2, -1, -1).sum())
    assert live == int(mask.to_dense().expand(2, 2, -1, -1).sum())


@pytest.mark.parametrize(
    ("mask", "ranks", "balance"),
    [
        (masks.causal(8192, block=64), 8, 0.99),
        (masks.butterfly(8192, block=64), 8, 0.99),
        (masks.local(8192, window=512, causal=True, block=64), 4, 0.95),
        (masks.documents([5000, 200, 1800, 300, 892], causal=True, block=64), 4, 0.95),
    ],
)
def test_live_tiles_are_balanced(mask, ranks, balance):
    assert distributed.shard(mask, ranks=ranks).loads.balance > balance


def test_causal_masks_are_dealt_in_zigzag_and_windows_in_runs():
    assert distributed.shard(masks.causal(8192, block=64), ranks=8).assignment.name == "zigzag"
    local = distributed.shard(masks.local(8192, window=128, block=64), ranks=4)
    assert local.assignment.name.startswith("contiguous")
    assert local.traffic(1, 1).sent.max() <= 4 * 64


def test_a_remote_key_costs_the_planner_what_the_model_says():
    shape, machine = costs.Shape(1, 1, 1, 128, 128, torch.bfloat16), costs.H100
    key = (1 + costs.BACKWARD_BYTES) * shape.key_bytes / machine.bandwidth
    assert pytest.approx(key / (shape.flops_per_score / machine.flops), rel=0.1) == planner.SCORES_PER_REMOTE_KEY


def test_documents_that_fill_ranks_exchange_nothing():
    plan = distributed.shard(masks.documents([256] * 4, block=64), ranks=4)
    assert plan.traffic(1, 1).sent.sum() == 0
    assert plan.chosen(distributed.Shape(1, 4, 4, 64, 64, torch.bfloat16)).stages == 0


def test_a_side_of_its_own_length_has_its_own_shards():
    plan = distributed.shard(BlockMask.dense(64, 200, block=16), ranks=3)
    assert plan.queries.length == 64
    assert plan.keys.length == 200
    assert len(plan.key_positions) == plan.keys.counts[0]


def test_a_ragged_last_chunk_is_the_last_of_its_rank():
    shards = Shards(100, 16, np.array([0, 1, 1, 0, 1, 0, 0]))
    assert shards.counts == [16 + 16 + 16 + 4, 48]
    assert shards.place_of_block(16).tolist() == [0, 0, 1, 1, 2, 2, 3]
    assert shards.rank_of_block(8).tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0]


def test_few_queries_with_remote_keys_attend_apart_from_the_others():
    mask = masks.local(1024, window=20, causal=True, block=16)
    plan = distributed.shard(mask, ranks=2, rank=1)
    first, others = plan.stages_for(1, 1, 0).stages
    remote = torch.ones(1024, dtype=torch.bool).index_fill(0, plan.key_positions, False)
    waits = mask.to_dense()[0, 0][plan.positions][:, remote].view(-1, 16, int(remote.sum())).any((1, 2))
    rows = waits.repeat_interleave(16).nonzero()[:, 0]
    assert torch.equal(first.queries, rows) and 0 < len(rows) < 64
    assert torch.equal(first.query_positions.tokens, plan.positions[rows])
    assert others.mask.to_dense()[0, 0][rows].sum() == 0
    (all_of_them,) = distributed.shard(masks.butterfly(1024, block=16), ranks=2).stages_for(1, 1, 0).stages
    assert all_of_them.queries is None


def test_queries_travel_where_they_are_few():
    plan = distributed.shard(BlockMask.dense(32, 65536, block=16), ranks=2)
    shape = distributed.Shape(1, 32, 8, 128, 128, torch.bfloat16)
    assert plan.chosen(shape).strategy == "queries"
    assert plan.query_traffic(1, 32).sent.tolist() == [16 * 32] * 2
    assert distributed.shard(masks.causal(65536), ranks=2).chosen(shape).strategy == "keys"


@pytest.mark.parametrize("name", ["batch", "heads", "kv_heads", "dim", "v_dim"])
def test_explain_refuses_sizes_that_are_none(name):
    plan = distributed.shard(masks.causal(256, block=16), ranks=2)
    for size in (2.5, [], "2", True):
        with pytest.raises(TypeError, match=f"{name} must be an integer; got"):
            plan.explain(**{name: size})
    with pytest.raises(ValueError, match=f"{name} must be at least 1; got 0"):
        plan.explain(**{name: 0})


def test_explain_refuses_what_is_no_dtype_and_no_machine():
    plan = distributed.shard(masks.causal(256, block=16), ranks=2)
    with pytest.raises(TypeError, match="dtype must be a floating-point type; got 'bf16'"):
        plan.explain(dtype="bf16")
    with pytest.raises(TypeError, match=r"machine must be a distributed\.Machine or None; got 'H100'"):
        plan.explain(machine="H100")


def test_explain_says_what_is_sent_and_chosen():
    plan = distributed.shard(masks.butterfly(4096, block=64), ranks=4)
    text = plan.explain(heads=8, kv_heads=4, dim=64)
    assert "4096 tokens over 4 ranks: contiguous, in chunks of 64; 1024 tokens a rank" in text
    assert "times are modelled for H100s with NVLink, not measured" in text
    shape = distributed.Shape(1, 8, 4, 64, 64, torch.bfloat16)
    sent = plan.traffic(1, 4).sent.mean() * shape.key_bytes / 1e6
    assert f"{sent:.2f}" in text
    assert f"chosen (*): {plan.chosen(shape).strategy}" in text
    odd = plan.explain(heads=6, kv_heads=3)
    assert "heads: not possible, 3 key heads are not a multiple of 4 ranks" in odd


def test_heads_do_not_travel_where_copies_between_peers_are_insisted_on():
    shape = distributed.Shape(1, 32, 32, 64, 64, torch.bfloat16)
    either, peers = (
        distributed.shard(masks.causal(2048, block=64), ranks=4, transport=name) for name in ("auto", "peer")
    )
    slow = distributed.Machine("slow network", flops=4e14, bandwidth=1e9, memory=2e12, latency=1e-5)
    assert either.chosen(shape, slow).strategy == "heads"
    assert peers.chosen(shape, slow).strategy != "heads"
    assert peers.estimates(shape, slow) == [each for each in either.estimates(shape, slow) if each.strategy != "heads"]
    assert "heads: not possible, they travel by collectives, and transport is 'peer'" in peers.explain(heads=32)


def test_the_model_hides_what_it_can_and_takes_the_cheapest():
    plan = distributed.shard(masks.causal(8192, block=64), ranks=4)
    shape = distributed.Shape(1, 8, 8, 64, 64, torch.bfloat16)
    slow = distributed.Machine("slow network", flops=4e14, bandwidth=1e9, memory=2e12, latency=1e-5)
    keys = [each for each in plan.estimates(shape, slow) if each.strategy == "keys"]
    assert [each.stages for each in keys] == [0, 1, 2, 3, 4]
    assert keys[4].total < keys[1].total
    alone = plan.estimates(shape, replace(slow, overlaps=False))
    assert all(each.hidden < 1e-9 for each in alone)
    assert plan.chosen(shape, slow).total == min(each.total for each in plan.estimates(shape, slow))
    fast = distributed.Machine("fast network", flops=1e12, bandwidth=1e15, memory=1e15, latency=0.0)
    joined, *staged = [each for each in plan.estimates(shape, fast) if each.strategy == "keys"]
    assert joined.hidden == 0.0 and all(each.hidden > 0.99 for each in staged)
    assert costs.default_machine(8) is distributed.H100
    assert costs.default_machine(9) is distributed.H100_HOSTS


def test_ranks_do_not_take_turns_in_the_backward():
    """With no stage, the second rank would wait for the first."""
    shape = distributed.Shape(1, 16, 16, 128, 128, torch.bfloat16)
    window, with_sinks = (
        distributed.shard(mask, ranks=2).chosen(shape)
        for mask in (masks.local(131072, window=4096, causal=True), masks.streaming(131072, window=4096, sink=64))
    )
    assert (str(window), str(with_sinks)) == ("keys, 0 st.", "keys, 1 st.")


@pytest.mark.parametrize("pattern", [masks.butterfly, masks.causal, lambda n: masks.local(n, window=4096, causal=True)])
def test_a_new_mask_of_128k_tokens_is_planned_quickly(pattern):
    taken = []
    for _ in range(3):
        mask = pattern(131072)
        started = time.thread_time()
        distributed.shard(mask, ranks=8, rank=3).stages_for(1, 8, 2)
        taken.append(time.thread_time() - started)
    assert min(taken) < 0.2
