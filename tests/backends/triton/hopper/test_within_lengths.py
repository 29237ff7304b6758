"""What lies past the lengths is left out of a plan of the Hopper backward, as in Python."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash.backends.triton.launcher import Launch
from sparseflash.backends.triton.persistent import backward_plan, cuts
from sparseflash.backends.triton.persistent.timeline import rank_kernel
from sparseflash.backends.triton.persistent.within_lengths import count_kernel, keep_kernel, time_kernel
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.backends.triton.schedule.worklists import full_first
from tests.backends.triton.hopper import reference_plan
from tests.backends.triton.hopper.hopper_problems import PARTS, assert_exact, run, some_problem
from tests.drawn.counts import examples_times
from tests.drawn.masks import block_masks


def started(kernel, programs, *arguments):
    Launch.of_all_arguments(kernel, torch.device("cpu"), num_warps=4, num_stages=1).start(programs, *arguments)


def within(plan, lengths, kv_heads, rows, queries):
    """`(work, entries)` of the kernels."""
    work, entries = torch.full_like(plan.work, -1), torch.full_like(plan.walked()[2], -1)
    time, moment = (torch.zeros(len(x), dtype=torch.int64) for x in (work, entries))
    added, cursor = torch.zeros(len(entries), dtype=torch.int32), torch.full_like(plan.made, 5)
    listed, of_lengths = (plan.work, plan.walked()[2]), (lengths, lengths.stride(0))
    tiles = len(plan.made) - 1
    started(count_kernel, len(work), *listed, *of_lengths, work, cursor, kv_heads, rows, tiles, queries)
    started(time_kernel, plan.programs, plan.start, work, time)
    additions = cursor, moment, added
    started(
        keep_kernel, len(work), *listed, plan.made, *of_lengths, time, entries, *additions, kv_heads, rows, queries
    )  # fmt: skip
    started(rank_kernel, tiles, plan.made, plan.chain, *additions, entries)
    return work, entries


def within_in_python(plan, lengths, kv_heads, rows, queries):
    """The entries of every item, and the number of entries without what lies past the lengths."""
    found, additions = [], {}
    for program, (begin, end) in enumerate(zip(plan.start[:-1].tolist(), plan.start[1:].tolist(), strict=True)):
        time = 0
        for number, first_key, first, count, _ in plan.work[begin:end].tolist():
            q_length, k_length = lengths[:, number // kv_heads].tolist()
            old = plan.entries[first : first + count].tolist() if first_key < k_length else []
            left = [[row, tile, None, None] for row, tile, *_ in old if row % rows * queries < q_length]
            for place, entry in enumerate(left):
                additions.setdefault(entry[0], []).append((time + place, program, entry))
            time += len(left) + 1
            found.append(left)
    for row, listed in additions.items():
        chain, chains = int(plan.chain[row]), int(plan.chain[row + 1] - plan.chain[row])
        for place, (_, _, entry) in enumerate(sorted(listed, key=lambda each: each[:2])):
            entry[2:] = chain + place % chains, place // chains
    return found


@examples_times(1 / 3)
@given(st.data(), st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.integers(1, 20))
def test_entries_past_the_lengths_are_left_out_and_the_others_are_ranked_anew(data, batch, kv_heads, group, programs):
    mask = data.draw(block_masks(most_tokens=200, blocks=(16, 32), batch=batch, heads=kv_heads * group))
    lengths = [[data.draw(st.integers(0, most)) for _ in range(batch)] for most in (mask.q_len, mask.k_len)]
    shortest, chain = data.draw(st.sampled_from([None, 1, 3])), data.draw(st.sampled_from([16, 1, 2]))
    cut = cuts.RULE if shortest is None else cuts.Rule(far=0, worth=0, parts=64, shortest=shortest)
    with mock.patch.object(cuts, "RULE", cut), mock.patch.object(backward_plan, "_SHORTEST_CHAIN", chain):
        plan = reference_plan.backward_plan(
            full_first(*mask.columns, mask.words, Tiling(mask.block_k, mask.block_q)),
            mask.pattern.expand(batch, kv_heads * group), kv_heads, mask.q_len, mask.k_len, programs=programs,
        )  # fmt: skip
    of = torch.tensor(lengths, dtype=torch.int32), kv_heads, -(-mask.q_len // mask.block_q), mask.block_q
    work, entries = within(plan, *of)
    wanted = within_in_python(plan, *of)
    for old, new, left in zip(plan.work.tolist(), work.tolist(), wanted, strict=True):
        assert new == [*old[:3], len(left), old[4]]
        assert entries[new[2] : new[2] + new[3]].tolist() == left


@pytest.mark.parametrize("cut", [cuts.RULE, PARTS])
@pytest.mark.parametrize("lengths", [(0, 392), (128, 129), (1, 0)])
@pytest.mark.parametrize("dim", [64, 128])
def test_exact_where_tiles_chains_and_sequences_are_past_the_lengths(dim, lengths, cut):
    problem = some_problem(dim=dim, v_dim=dim)
    problem = replace(problem, recipe=replace(problem.recipe, lengths=lengths))
    assert_exact(problem, run(problem, gradients=True, programs=3, cut=cut))
