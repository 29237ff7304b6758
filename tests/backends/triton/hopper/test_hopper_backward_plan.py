"""Every live tile once, chains without gaps, and an order that cannot deadlock."""

import random
from collections import OrderedDict
from itertools import pairwise, zip_longest
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import masks
from sparseflash.backends.triton.persistent import cuts
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.backends.triton.schedule.worklists import full_first
from tests.backends.triton.hopper.hopper_layouts import LAYOUTS, mask_of
from tests.backends.triton.hopper.reference_plan import backward_plan
from tests.drawn.masks import block_masks

CUT = cuts.Rule(far=0, worth=0, parts=1 << 10, shortest=1)
RULES = [cuts.RULE, CUT, CUT._replace(shortest=3)]


def planned(mask, batch=1, heads=16, kv_heads=None, programs=132, rule=cuts.RULE):
    lists = full_first(*mask.columns, mask.words, Tiling(mask.block_k, mask.block_q))
    pattern = mask.pattern.expand(batch, heads)
    with mock.patch.object(cuts, "RULE", rule):
        return backward_plan(lists, pattern, kv_heads or heads, mask.q_len, mask.k_len, programs=programs)


def by_program(made):
    work, entries, start = (x.tolist() for x in (made.work, made.entries, made.start))
    return [[entries[first : first + n] for _, _, first, n, _ in work[a:b]] for a, b in pairwise(start)]


@st.composite
def plans(draw):
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    heads = kv_heads * group
    mask = draw(block_masks(most_tokens=200, blocks=(16, 32), batch=batch, heads=heads))
    rule = draw(st.sampled_from(RULES))
    return mask, batch, heads, kv_heads, planned(mask, batch, heads, kv_heads, draw(st.integers(1, 40)), rule)


@given(plans())
def test_every_live_tile_is_in_the_item_of_its_keys(drawn):
    mask, batch, heads, kv_heads, made = drawn
    (rows, columns), pattern, words = mask.blocks, mask.pattern.expand(batch, heads), {}
    for b in range(batch):
        for h in range(heads):
            for r in range(rows):
                row = int(pattern[b, h]) * rows + r
                for i in range(mask.indptr[row], mask.indptr[row + 1]):
                    item = (b * kv_heads + h // (heads // kv_heads), int(mask.indices[i]) * mask.block_k)
                    words.setdefault(item, []).append(((b * heads + h) * rows + r, int(mask.tile[i])))
    entries, found = made.entries.tolist(), {}
    for number, first_key, first, count, part in made.work.tolist():
        assert part or (number, first_key) not in found
        found.setdefault((number, first_key), []).extend(
            (row, tile) for row, tile, _, _ in entries[first : first + count]
        )
    found = {item: sorted(each) for item, each in found.items()}
    assert len(found) == batch * kv_heads * columns
    assert {item: each for item, each in found.items() if each} == {item: sorted(each) for item, each in words.items()}
    assert len(entries) == sum(map(len, words.values()))


@given(plans())
def test_the_parts_of_an_item_are_numbered_in_the_order_in_which_they_are_merged(drawn):
    mask, made, parts = drawn[0], drawn[-1], {}
    for number, first_key, _, count, part in made.work.tolist():
        if part:
            assert count > 0
            parts.setdefault(number * mask.blocks[1] + first_key // mask.block_k, []).append((part - 1, count))
    merged = made.merged.tolist()
    assert [number for number, _, _, _ in merged] == sorted(parts)
    for number, first, count, _ in merged:
        assert count > 1 and sorted(part for part, _ in parts[number]) == list(range(first, first + count))
        lengths = [length for _, length in parts[number]]
        assert max(lengths) - min(lengths) <= 1
    assert sorted(part for each in parts.values() for part, _ in each) == list(range(made.parts))


@given(plans())
def test_the_ranks_of_a_chain_are_consecutive_and_its_tile_is_one(drawn):
    made = drawn[-1]
    chains, first = {}, made.chain.tolist()
    for row, _, chain, rank in made.entries.tolist():
        assert first[row] <= chain < first[row + 1]
        chains.setdefault(chain, []).append(rank)
    assert sorted(chains) == list(range(made.chains))  # `finish_kernel` reads all of them
    assert all(sorted(ranks) == list(range(len(ranks))) for ranks in chains.values())


def runs_to_the_end(made, seed):
    """Whether programs of any speed end, if each adds in its own order and every entry waits for its rank."""
    draw, added = random.Random(seed), [0] * made.chains
    left = [[entry for entries in each for entry in entries][::-1] for each in by_program(made)]
    while any(left):
        ready = [each for each in left if each and added[each[-1][2]] == each[-1][3]]
        if not ready:
            return False
        added[draw.choice(ready).pop()[2]] += 1
    return True


@given(plans(), st.integers(0, 2**16))
def test_nothing_waits_for_ever(drawn, seed):
    assert runs_to_the_end(drawn[-1], seed)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_nothing_waits_for_ever_in_long_sequences(name):
    assert runs_to_the_end(planned(mask_of(name), heads=3), seed=0)


def test_ranks_that_were_exchanged_would_wait_for_ever():
    made = planned(mask_of("causal"), heads=1, programs=2)
    assert runs_to_the_end(made, seed=0)
    made.entries[:, 3] = made.entries[:, 3].flip(0)
    assert not runs_to_the_end(made, seed=0)


@given(plans())
def test_a_plan_is_the_same_every_time(drawn):
    mask, batch, heads, kv_heads, _ = drawn
    made, again = (planned(mask, batch, heads, kv_heads, programs=7, rule=CUT) for _ in range(2))
    assert all(map(torch.equal, (made.start, made.work, made.entries), (again.start, again.work, again.entries)))


@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_programs_have_alike_much_to_do_and_wait_little(name, heads):
    made = planned(mask_of(name), heads=heads)
    programs = by_program(made)
    loads = [sum(len(entries) + 1 for entries in each) for each in programs]
    assert max(loads) <= 1.04 * sum(loads) / len(loads)
    free = (2 * len(made.entries) + ITEM * len(made.work)) / 132
    assert simulated(programs) <= 1.06 * free * max(loads) * len(loads) / sum(loads)
    assert made.chains <= 1.5 * 128 * heads


@pytest.mark.parametrize("name", ["causal", "dense"])
def test_programs_that_run_together_read_the_same_tiles_of_queries(name):
    """From 65,536 tokens on, a head's queries and their gradients exceed the L2 cache."""
    made = planned(getattr(masks, name)(512 * 128, block=128), heads=1)
    assert missed(by_program(made), tiles=256) < 0.05


def missed(programs, tiles):
    used, entries, misses = OrderedDict(), 0, 0
    for at_one_time in zip_longest(*([row for each in items for row, *_ in [*each, (None,)]] for items in programs)):
        for row in at_one_time:
            if row is None:
                continue
            entries += 1
            misses += row not in used
            used[row] = True
            used.move_to_end(row)
            if len(used) > tiles:
                used.popitem(last=False)
    return misses / entries


ITEM, READ, SEEN = 1.5, 0.35, 0.9  # begin and end of an item; reading by a sender; visibility of an addition: in steps


def simulated(programs):
    """An entry has two steps, each with its own sender."""
    lists = [[entry for entries in each for entry in entries] for each in programs]
    ends = [set(torch.tensor([len(entries) for entries in each]).cumsum(0).tolist()) for each in programs]
    clock = [0.0] * len(lists)
    free, sent = ([[0.0, 0.0] for _ in lists] for _ in range(2))
    at, seen, made, waiting = [0] * len(lists), {}, {}, {}
    active = list(range(len(lists)))
    while active:
        p = active.pop()
        while at[p] < len(lists[p]):
            _, _, chain, rank = lists[p][at[p]]
            if made.get(chain, 0) < rank:
                waiting[chain, rank] = p
                break
            for half in range(2):
                clock[p] = max(clock[p] + 1, free[p][half])
                begin = max(clock[p], sent[p][half], seen.get((chain, half), 0.0))
                free[p][half] = begin + READ
                sent[p][half] = seen[chain, half] = begin + SEEN
            made[chain] = rank + 1
            at[p] += 1
            if at[p] in ends[p]:
                clock[p] = max(clock[p] + ITEM, *free[p])
                free[p] = [clock[p] + READ] * 2
            if (chain, rank + 1) in waiting:
                active.append(waiting.pop((chain, rank + 1)))
    return max(clock)
