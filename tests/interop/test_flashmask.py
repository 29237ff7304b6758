import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, masks
from sparseflash.interop import from_flashmask, to_flashmask
from tests.drawn.masks import block_masks, blocks, lengths
from tests.drawn.rule_spellings import Data, by_numbers


def dense_of(indices, causal, q_len):
    """`flashmask_to_densemask` of Paddle's documentation, bool `[B, H, Nq, Nk]`."""
    batch, heads, k_len, bounds = indices.shape
    live = torch.ones(batch, heads, q_len, k_len, dtype=torch.bool)
    with_ends = bounds == (2 if causal else 4)
    for b in range(batch):
        for h in range(heads):
            for k in range(k_len):
                r = indices[b, h, k].tolist()
                live[b, h, r[0] : r[1] if with_ends else None, k] = False
                if causal:
                    live[b, h, :k, k] = False
                else:
                    start, stop = (r[2], r[3]) if with_ends else (0, r[1])
                    live[b, h, start:stop, k] = False
    return live


def representable(live, causal):
    q_len, k_len = live.shape
    for k in range(k_len):
        dead = (~live[:, k]).tolist()
        runs = [q for q in range(q_len) if dead[q] and (q == 0 or not dead[q - 1])]
        ends = [q for q in range(q_len) if dead[q] and (q == q_len - 1 or not dead[q + 1])]
        if causal:
            below = [q for q in range(k, q_len) if dead[q] and (q == k or not dead[q - 1])]
            fits = all(dead[:k]) and len(below) <= 1
        else:
            fits = len(runs) <= 1 or (len(runs) == 2 and ends[0] <= k and runs[1] >= k)
        if not fits:
            return k
    return None


@st.composite
def intervals(draw, causal, most=60):
    k_len = draw(lengths(most))
    q_len = k_len if causal else draw(st.just(k_len) | lengths(most))
    bounds = draw(st.sampled_from([1, 2] if causal else [2, 4]))
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    indices = torch.randint(0, q_len + 3, (batch, heads, k_len, bounds), generator=generator, dtype=torch.int32)
    if draw(st.booleans()):
        indices = indices[:, :, torch.arange(k_len) // draw(st.integers(1, k_len)) * 0]
    return indices, q_len


@pytest.mark.parametrize("causal", [False, True])
@given(data=st.data())
def test_intervals_come_in_as_their_definition_says(causal, data):
    indices, q_len = data.draw(intervals(causal))
    block = data.draw(blocks((16, 32)))
    mask = from_flashmask(indices, causal=causal, q_len=q_len, block=block)
    assert mask == BlockMask.from_dense(dense_of(indices, causal, q_len), block=block)


@pytest.mark.parametrize("causal", [False, True])
@given(data=st.data())
def test_any_mask_goes_out_or_the_first_key_that_cannot_is_named(causal, data):
    mask = data.draw(block_masks(most_tokens=50, blocks=(16, 32), batch=2, heads=2))
    if causal and mask.q_len != mask.k_len:
        with pytest.raises(ValueError, match="causal must be False"):
            to_flashmask(mask, causal=True)
        return
    dense = mask.to_dense()
    worst = [representable(head, causal) for batch in dense for head in batch]
    if all(k is None for k in worst):
        indices, said = to_flashmask(mask, causal=causal)
        assert said == causal and indices.dtype == torch.int32
        assert torch.equal(dense_of(indices, causal, mask.q_len), dense)
        assert from_flashmask(indices, causal=causal, q_len=mask.q_len, block=(mask.block_q, mask.block_k)) == (
            BlockMask.from_dense(dense, block=(mask.block_q, mask.block_k))
        )
    else:
        with pytest.raises(ValueError, match="FlashMask must have at most one run") as caught:
            to_flashmask(mask, causal=causal)
        key, head, batch = map(
            int, re.search(r"key (\d+) of head (\d+) of batch element (\d+)", str(caught.value)).groups()
        )
        assert representable(dense[batch, head], causal) == key


@given(data=st.data(), causal=st.booleans())
def test_masks_of_intervals_go_out_and_come_back(data, causal):
    n, block = data.draw(lengths(60)), data.draw(blocks((16, 32)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9999)))
    key = torch.arange(n)
    lower = torch.sort(
        torch.stack([key + (torch.rand(2, n, generator=generator) * (n - key + 1)).long()]).squeeze(0), 0
    )
    upper = torch.sort((torch.rand(2, n, generator=generator) * (key + 1)).long(), 0)
    columns = [*lower.values] if causal else [*lower.values, *upper.values]
    live = dense_of(torch.stack(columns, -1)[None, None], causal, n)[0, 0]
    mask = BlockMask.from_dense(live, block=block)
    out = to_flashmask(mask, causal=causal)
    assert torch.equal(dense_of(*out, n)[0, 0], live)
    assert from_flashmask(out.startend_row_indices, causal=causal, block=block) == mask


@pytest.mark.parametrize(
    ("mask", "causal", "bounds"),
    [
        (lambda: masks.causal(300, block=64), True, 1),
        (lambda: masks.local(300, window=70, causal=True, block=64), True, 1),
        (lambda: masks.local(300, window=70, block=64), False, 2),
        (lambda: BlockMask.dense(300, block=64), False, 2),
        (lambda: BlockMask.dense(200, 300, block=64), False, 2),
        (lambda: masks.causal(200, 300, block=64), False, 2),
        (lambda: masks.causal(300, 200, block=64), False, 4),
        (lambda: BlockMask.from_function(lambda q, k: q // 70 == k // 70, 300, block=64), False, 2),
        (lambda: BlockMask.from_function(lambda q, k: (k <= q) & ((q - k < 50) | (k < 4)), 300, block=64), True, 1),
        (lambda: BlockMask.from_function(lambda q, k: (k <= q) & ((q - k < 50) | (q > 250)), 300, block=64), True, 2),
        (lambda: BlockMask.from_function(lambda q, k: ((q - k).abs() < 50) | (q > 250), 300, block=64), False, 4),
    ],
)
def test_common_masks_take_the_fewest_bounds(mask, causal, bounds):
    mask = mask()
    out = to_flashmask(mask)
    assert out.causal == causal and out.startend_row_indices.shape == (1, 1, mask.k_len, bounds)
    assert torch.equal(dense_of(*out, mask.q_len), mask.to_dense())
    assert from_flashmask(out.startend_row_indices, causal=causal, q_len=mask.q_len, block=64) == mask


def test_lower_bounds_stay_below_the_diagonal_and_upper_ones_above():
    indices, causal = to_flashmask(BlockMask.from_function(lambda q, k: (q < 3) | (q >= 9), 16, block=16), causal=False)
    assert not causal
    for k, (r0, r1, r2, r3) in enumerate(indices[0, 0].tolist()):
        assert r0 == r1 or r0 >= k
        assert r2 == r3 or r3 <= k + 1


def test_query_heads_of_a_group_share_a_mask():
    layout = torch.ones(4, 2, 2, dtype=torch.bool)
    layout[2:, 0, 1] = False
    mask = BlockMask.from_layout(layout, block=16)
    indices, causal = to_flashmask(mask, kv_heads=2)
    assert indices.shape == (1, 2, 32, 2) and not causal
    assert from_flashmask(indices, causal=False, heads=4, block=16) == mask
    with pytest.raises(ValueError, match=re.escape("must have one mask; got different ones among heads 0..3.")):
        to_flashmask(mask, kv_heads=1)
    with pytest.raises(ValueError, match="kv_heads must divide the mask's 4 heads; got 3"):
        to_flashmask(mask, kv_heads=3)


def test_only_tiles_at_an_intervals_end_are_looked_at(monkeypatch):
    from sparseflash.interop import interval_tiles

    looked_at = []
    cut_tiles = interval_tiles._cut_tiles

    def counting(intervals, rows, *others):
        looked_at.append(len(rows))
        return cut_tiles(intervals, rows, *others)

    monkeypatch.setattr(interval_tiles, "_cut_tiles", counting)
    mask = masks.causal(4096, block=64)
    assert from_flashmask(to_flashmask(mask)[0], causal=True, block=64) == mask
    assert looked_at == [64]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: to_flashmask(masks.butterfly(2048)), ValueError, "FlashMask must have at most one run of masked "
         "queries below the diagonal and one above it for every key; got 384..511, 640..1023, 1152..2047 for key 0 of "
         "head 0 of batch element 0."),
        (lambda: to_flashmask(BlockMask.dense(64, block=16), causal=True), ValueError, "and all masked above it for "
         "every key; got none for key 1 of"),
        (lambda: to_flashmask(BlockMask.from_function(lambda q, k: q % 2 == 0, 64, block=16)), ValueError,
         "got more than 2 for key 0 of"),
        (lambda: from_flashmask(torch.zeros(1, 1, 4, 4), causal=True), ValueError,
         "startend_row_indices must have shape [B, H, Nk, 1 or 2] with causal=True; got [1, 1, 4, 4]."),
        (lambda: from_flashmask(torch.zeros(1, 4, 2), causal=False), ValueError,
         "must have shape [B, H, Nk, 2 or 4] with causal=False; got [1, 4, 2]."),
        (lambda: from_flashmask(torch.zeros(1, 1, 4, 2), causal=False), TypeError,
         "startend_row_indices must be an integer tensor; got torch.float32."),
        (lambda: from_flashmask(torch.zeros(1, 1, 4, 2, dtype=torch.complex64), causal=False), TypeError,
         "startend_row_indices must be an integer tensor; got torch.complex64."),
        (lambda: from_flashmask(torch.full((1, 1, 4, 2), -1), causal=False), ValueError,
         "startend_row_indices must not be negative; got -1."),
        (lambda: from_flashmask(torch.ones(1, 1, 4, 1).int(), causal=True, q_len=5), ValueError,
         "q_len must be 4, the number of keys, for a causal FlashMask; got 5."),
        (lambda: from_flashmask(torch.ones(1, 2, 4, 1).int(), causal=True, heads=3), ValueError,
         "heads must be a multiple of the 2 that startend_row_indices has; got 3."),
    ],
)  # fmt: skip
def test_errors_say_what_must_hold(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


DATA = Data(0, 20)
DOCS, LENS, SOME, WIDTHS = DATA.docs.sort(1).values, DATA.lens, DATA.some, DATA.widths


def between(b, h, q, k):
    start, end = LENS[b].sort().values
    return ((k < start) | (k >= end)) & (k <= q)


RULES = {
    "docs[b][q]": lambda b, h, q, k: (DOCS[b][q] == DOCS[b][k]) & (k <= q),
    "docs[b].take(q)": lambda b, h, q, k: DOCS[b].take(q) == DOCS[b].take(k),
    "lens[b].max()": lambda b, h, q, k: (k < LENS[b].max()) & (k <= q),
    "start, end = lens[b]": between,
    "(h == some).any()": lambda b, h, q, k: (h == SOME).any() | (k <= q),
    "if h == 1": lambda b, h, q, k: k <= q if h == 1 else q - k < WIDTHS[h],
}


@pytest.mark.parametrize("name", RULES)
def test_masks_of_rules_of_batch_element_and_head_go_out_and_come_back(name):
    found = to_flashmask(BlockMask.from_function(RULES[name], 20, batch=3, heads=4, block=16))
    back = from_flashmask(found.startend_row_indices, causal=found.causal, heads=4, block=16)
    assert torch.equal(back.to_dense().expand(3, 4, -1, -1), by_numbers(RULES[name], 3, 4, 20, 20))
