import re

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from torch.nn.attention.flex_attention import (
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    noop_mask,
    or_masks,
)

from sparseflash import BlockMask, attention, masks
from sparseflash.interop import from_flex, to_flex
from sparseflash.interop.flex_attention import create_block_mask as own_create_block_mask
from sparseflash.interop.flex_blocks import supported
from tests.drawn.counts import examples_times
from tests.drawn.masks import RULES, block_masks, lengths, rule
from tests.drawn.rule_spellings import Data, by_numbers, data_rules

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def as_lists_say(flex, batch, heads):
    (q_len, k_len), (block_q, block_k) = flex.seq_lengths, flex.BLOCK_SIZE
    rule = create_mask(flex.mask_mod, batch, heads, q_len, k_len, device="cpu")
    dense = torch.zeros(batch, heads, q_len, k_len, dtype=torch.bool)
    for counts, indices, inside in (
        (flex.kv_num_blocks, flex.kv_indices, rule),
        (flex.full_kv_num_blocks, flex.full_kv_indices, torch.ones_like(rule)),
    ):
        counts, indices = counts.expand(batch, heads, -1), indices.expand(batch, heads, -1, -1)
        for b, h, i in torch.ones(counts.shape).nonzero().tolist():
            for j in indices[b, h, i, : counts[b, h, i]].tolist():
                q, k = slice(i * block_q, (i + 1) * block_q), slice(j * block_k, (j + 1) * block_k)
                assert not dense[b, h, q, k].any(), "a block must be listed once"
                dense[b, h, q, k] = inside[b, h, q, k]
    return dense


@given(mask=block_masks(batch=2, heads=2))
def test_the_lists_and_the_mask_mod_each_say_the_mask(mask):
    flex = to_flex(mask)
    assert flex.seq_lengths == (mask.q_len, mask.k_len) and flex.BLOCK_SIZE == (mask.block_q, mask.block_k)  # noqa: SIM300
    dense = mask.to_dense().expand(2, 2, -1, -1)
    assert torch.equal(create_mask(flex.mask_mod, 2, 2, mask.q_len, mask.k_len, device="cpu"), dense)
    assert torch.equal(as_lists_say(flex, 2, 2), dense)


def test_a_rule_of_the_partial_tiles_takes_the_place_of_their_bits():
    def causal(b, h, q, k):
        return k <= q

    mask = masks.local(100, window=40, block=16) & masks.causal(100, block=16)
    whole = mask.to_layout() & masks.causal(100, block=16).to_layout()
    by_blocks = BlockMask.from_layout(whole[0, 0], block=16, q_len=100, k_len=100) & masks.causal(100, block=16)
    flex = to_flex(by_blocks, mask_mod=causal)
    assert flex.mask_mod is causal
    assert torch.equal(as_lists_say(flex, 1, 1), by_blocks.to_dense())


@given(mask=block_masks(batch=2, heads=2))
def test_a_mask_goes_out_and_comes_back(mask):
    assert from_flex(to_flex(mask)) == BlockMask.from_dense(mask.to_dense(), block=(mask.block_q, mask.block_k))


@examples_times(1 / 2)  # FlexAttention compiles for each
@given(mask=block_masks(most_tokens=100, batch=2, heads=2), seed=st.integers(0, 999))
@example(mask=BlockMask.from_layout(torch.zeros(2, 2, 3, 3, dtype=torch.bool), block=16), seed=0)
def test_eager_flexattention_under_the_exported_mask_is_our_attention(mask, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(2, 2, n, 16, generator=generator, dtype=torch.float64) for n in (mask.q_len, mask.k_len, mask.k_len)
    )
    out = flex_attention(q, k, v, block_mask=to_flex(mask))
    for backend in ("reference", "blockwise"):
        torch.testing.assert_close(out, attention(q, k, v, mask, backend=backend), rtol=0, atol=1e-12)


@given(
    name=st.sampled_from(RULES),
    number=st.integers(1, 100),
    sizes=st.tuples(lengths(100), lengths(100)),
    block=st.sampled_from([(16, 16), (32, 64), (64, 16)]),
)
def test_masks_made_by_flexattention_come_in(name, number, sizes, block):
    live = rule(name, number)
    flex = create_block_mask(lambda b, h, q, k: live(q, k), None, None, *sizes, device="cpu", BLOCK_SIZE=block)
    assert from_flex(flex) == BlockMask.from_function(live, *sizes, block=block)


@given(mask=block_masks(most_tokens=100, batch=2, heads=2))
def test_what_flexattention_makes_of_the_exported_mask_mod_are_our_lists(mask):
    ours = to_flex(mask)
    block = (mask.block_q, mask.block_k)
    batch, heads = ours.kv_num_blocks.shape[:2]
    theirs = create_block_mask(ours.mask_mod, batch, heads, mask.q_len, mask.k_len, device="cpu", BLOCK_SIZE=block)
    for name in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(ours, f"{name}_num_blocks")
        assert torch.equal(counts, getattr(theirs, f"{name}_num_blocks")), name
        listed = torch.arange(getattr(ours, f"{name}_indices").shape[-1]) < counts[..., None]
        a, b = (getattr(flex, f"{name}_indices")[listed] for flex in (ours, theirs))
        assert torch.equal(a, b), name


def test_flexattention_need_not_sort_all_tiles(monkeypatch):
    # Computing the second pair of lists takes a minute at a million tokens.
    monkeypatch.delattr("torch.nn.attention.flex_attention._transpose_ordered")
    mask = masks.local(300, window=90, block=32)
    assert from_flex(to_flex(mask)) == mask


SPELLINGS = data_rules(Data(0, 20))


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.searchsorted:UserWarning")
def test_a_mask_mod_means_what_it_says_of_single_numbers_however_it_is_written(name):
    flex = create_block_mask(SPELLINGS[name], 3, 4, 18, 20, device="cpu", BLOCK_SIZE=16)
    assert torch.equal(from_flex(flex).to_dense().expand(3, 4, -1, -1), by_numbers(SPELLINGS[name], 3, 4, 18, 20))


WINDOWS = torch.tensor([30, 3])


def window_of_head(b, h, q, k):
    return (k <= q) & (q - k < WINDOWS[h])


def window_of_element(b, h, q, k):
    return (k <= q) & (q - k < WINDOWS[b])


@pytest.mark.parametrize("mod", [window_of_head, window_of_element])
def test_a_mask_mod_of_the_head_is_not_taken_for_that_of_head_0(mod):
    name = "heads" if mod is window_of_head else "batch"
    flex = create_block_mask(mod, None, None, 60, 60, device="cpu", BLOCK_SIZE=64)
    with pytest.raises(ValueError, match=f"mask_mod may depend on the .*: pass {name}=, the attention's"):
        from_flex(flex)
    mask = from_flex(flex, **{name: 2})
    sizes = {"batch": 1, "heads": 1, name: 2}
    assert mask == BlockMask.from_dense(create_mask(mod, *sizes.values(), 60, 60, device="cpu"), block=64)
    q = torch.randn(sizes["batch"], sizes["heads"], 60, 16)
    torch.testing.assert_close(attention(q, q, q, mask), flex_attention(q, q, q, block_mask=flex))
    assert from_flex(flex, **{name: 1}) == BlockMask.from_function(lambda q, k: mod(0, 0, q, k), 60, block=64)


def test_numbers_must_be_those_of_the_lists_and_change_nothing_where_nobody_asks():
    flex = create_block_mask(window_of_head, None, 2, 60, 60, device="cpu", BLOCK_SIZE=64)
    assert from_flex(flex, heads=2, batch=5) == from_flex(flex)
    with pytest.raises(ValueError, match="heads must be 2, as in block_mask, or left out; got 3"):
        from_flex(flex, heads=3)
    with pytest.raises(ValueError, match="batch must be 1, as in block_mask, or left out; got 0"):
        from_flex(flex, batch=0)
    with pytest.raises(TypeError, match="heads must be an integer"):
        from_flex(flex, heads=2.5)


def test_combined_rules_ask_for_no_number_by_making_a_tensor_like_it():
    rules = [lambda b, h, q, k: k <= q, lambda b, h, q, k: q - k < 9]
    for combined in (and_masks(*rules), or_masks(*rules), noop_mask):
        flex = create_block_mask(combined, None, None, 60, 60, device="cpu", BLOCK_SIZE=16)
        assert from_flex(flex).shape == (1, 1, 60, 60)
    with pytest.raises(ValueError, match="may depend on the head"):
        from_flex(
            create_block_mask(and_masks(rules[0], window_of_head), None, None, 60, 60, device="cpu", BLOCK_SIZE=16)
        )


@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, q, k: (q - k < int(WINDOWS[0])) & (k < WINDOWS[b]),
        lambda b, h, q, k: (q - k < WINDOWS[0].item()) & (k < WINDOWS[b]),
        lambda b, h, q, k: (k < WINDOWS[b]) if WINDOWS[0] > 3 else k <= q,
    ],
)
def test_a_mask_mod_that_nobody_can_trace_may_ask_for_a_number(mod):
    flex = create_block_mask(mod, None, None, 60, 60, device="cpu", BLOCK_SIZE=64)
    with pytest.raises(ValueError, match=r"may depend on the batch element, .*: pass batch="):
        from_flex(flex)
    mask = from_flex(flex, batch=2, heads=1)
    assert mask == BlockMask.from_dense(create_mask(mod, 2, 1, 60, 60, device="cpu"), block=64)


def test_exported_rules_may_be_combined():
    mask = masks.local(60, window=9, block=16)
    mod = and_masks(to_flex(mask).mask_mod, lambda b, h, q, k: k <= q)
    flex = create_block_mask(mod, None, None, 60, 60, device="cpu", BLOCK_SIZE=16)
    assert from_flex(flex, batch=1, heads=1) == mask & masks.causal(60, block=16)


def test_a_slice_is_told_from_a_mask():
    whole = create_block_mask(lambda b, h, q, k: k <= q, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    part = whole[:, :, 2:]
    part.mask_mod = lambda b, h, q, k: k <= q + 32
    part.seq_lengths = 32, 64  # PyTorch 2.14
    assert from_flex(part) == masks.causal(32, 64, block=16)
    part.seq_lengths = 64, 64  # before 2.14
    with pytest.raises(ValueError, match=r"got 2 block rows of 16\. A slice keeps .* from_flex\(whole\).crop"):
        from_flex(part)
    assert from_flex(whole).crop(q=(32, 64)) == masks.causal(32, 64, block=16)


def test_a_mask_mod_is_never_asked_past_the_end():
    seen = torch.ones(40, dtype=torch.bool)  # a position of 40 or more would be out of range

    def mod(b, h, q, k):
        return (k <= q) & seen[q] & seen[k]

    flex = create_block_mask(mod, None, None, 40, 40, device="cpu", BLOCK_SIZE=16)
    assert from_flex(flex) == masks.causal(40, block=16)


def test_a_mask_mod_is_asked_about_partial_blocks_only():
    flex = create_block_mask(lambda b, h, q, k: k <= q, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    flex.mask_mod = lambda b, h, q, k: q < 0
    assert from_flex(flex) == BlockMask.from_layout(torch.ones(4, 4, dtype=torch.bool).tril(-1), block=16)


def test_a_mask_without_full_lists_and_one_without_partial_blocks_come_in():
    counts, indices = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    flex = FlexBlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16, mask_mod=lambda b, h, q, k: k <= q)
    assert from_flex(flex) == masks.causal(32, block=16)
    everything = FlexBlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16)
    assert from_flex(everything) == BlockMask.from_layout(torch.ones(2, 2, dtype=torch.bool).tril(), block=16)
    full = FlexBlockMask.from_kv_blocks(counts * 0, indices, counts, indices, BLOCK_SIZE=16, seq_lengths=(30, 31))
    want = BlockMask.from_layout(torch.ones(2, 2, dtype=torch.bool).tril(), block=16, q_len=30, k_len=31)
    assert from_flex(full) == want


def with_lists(counts, indices, **others):
    counts, indices = (torch.tensor(x, dtype=torch.int32)[None, None] for x in (counts, indices))
    return FlexBlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16, compute_q_blocks=False, **others)


def doubled():
    flex = with_lists([1, 1], [[0, 0], [1, 0]])
    flex.full_kv_num_blocks, flex.full_kv_indices = flex.kv_num_blocks, flex.kv_indices
    return flex


def of_other_heads():
    flex = create_block_mask(lambda b, h, q, k: k <= q + h, 1, 2, 32, 32, device="cpu", BLOCK_SIZE=16)
    flex.full_kv_num_blocks = flex.full_kv_num_blocks.repeat(1, 2, 1)[:, :3]
    flex.full_kv_indices = flex.full_kv_indices.repeat(1, 2, 1, 1)[:, :3]
    return flex


@pytest.mark.parametrize(
    ("flex", "error", "message"),
    [
        (lambda: with_lists([1, 3], [[0, 0], [0, 1]]), ValueError,
         "counts of partial blocks must lie in 0..2, the width of their lists; got 1..3."),
        (lambda: with_lists([1, -1], [[0, 0], [0, 1]]), ValueError, "got -1..1."),
        (lambda: with_lists([1, 1], [[0, 0], [5, 1]]), ValueError,
         "block_mask must list blocks of its 32 keys, 0 to 1; got 5."),
        (lambda: with_lists([1, 2], [[0, 0], [1, 1]]), ValueError, "a tile must not be listed twice."),
        (doubled, ValueError, "a tile must not be listed twice."),
        (of_other_heads, ValueError, "the lists of full and of partial blocks must have one shape [B, H, M]; got"),
        (lambda: with_lists([1, 1, 1], [[0, 0], [1, 0], [1, 0]], seq_lengths=(32, 32)), ValueError,
         "the lists of partial blocks must have shapes [B, H, 2] and [B, H, 2, width]; got [1, 1, 3] and"),
        (lambda: with_lists([1, 1], [[0, 0], [1, 0]], mask_mod=lambda b, h, q, k: q - k), TypeError,
         "mask_mod must return bools (True: live); got torch.int64."),
        (lambda: create_block_mask(lambda b, h, q, k: k <= q, 2, 1, 32, 32, device="cpu", BLOCK_SIZE=16)[0],
         RuntimeError, "mask_mod"),
    ],
)  # fmt: skip
def test_errors_say_what_must_hold(flex, error, message):
    with pytest.raises(error, match=re.escape(message)):
        from_flex(flex())


SIZES = st.sampled_from([1, 3, 8, 16, 24, 48, 64, 100, 384, 512])


@given(
    st.integers(1, 700), st.integers(1, 700), SIZES, SIZES, st.integers(0, 300), st.integers(0, 300), st.booleans(),
    st.booleans(),
)  # fmt: skip
@example(600, 600, 512, 512, 0, 300, True, False)
@example(50, 70, 8, 8, 3, 20, False, True)
def test_lists_of_blocks_of_any_size(q_len, k_len, block_q, block_k, left, right, by_head, separate):
    def mod(b, h, q, k):
        return (k <= q + right * (h + 1)) & (k >= q - left) if by_head else (k <= q + right) & (k >= q - left)

    if q_len * k_len // (block_q * block_k) > 4000:
        q_len, k_len = min(q_len, 60), min(k_len, 60)
    flex = create_block_mask(
        mod, 1, 2 if by_head else 1, q_len, k_len, device="cpu", BLOCK_SIZE=(block_q, block_k),
        separate_full_blocks=separate,
    )  # fmt: skip
    mask = from_flex(flex)
    mask.validate()
    live = create_mask(mod, 1, 2 if by_head else 1, q_len, k_len, device="cpu")
    assert torch.equal(mask.to_dense().expand_as(live), live)
    size = supported(block_q), supported(block_k)
    ours = own_create_block_mask(mod, 1, 2 if by_head else 1, q_len, k_len, device="cpu", BLOCK_SIZE=(block_q, block_k))
    assert (mask.block_q, mask.block_k) == (ours.block_q, ours.block_k) == size and torch.equal(
        ours.to_dense().expand_as(live), live
    )
    if separate and block_q % size[0] == block_k % size[1] == 0 and bool(flex.full_kv_num_blocks.any()):
        assert bool((mask.tile == 0).any())


FIVE = {
    "causal": lambda: masks.causal(1000),
    "window": lambda: masks.local(1000, window=200, causal=True),
    "butterfly": lambda: masks.butterfly(1000, causal=True),
    "heads and batch": lambda: BlockMask.from_dense(
        torch.rand(2, 4, 500, 700, generator=torch.Generator().manual_seed(0)) < 0.1
    ),
    "lengths": lambda: masks.local(1000, window=300).with_lengths(torch.tensor([1000, 423])),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", FIVE)
def test_compiled_flexattention_under_the_exported_mask_is_our_kernel(name):
    mask = FIVE[name]().to("cuda")
    assert len(mask.bits) > 0, "the mask must have partial tiles"
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, 4, n, 64, generator=generator, device="cuda", dtype=torch.float16).requires_grad_()
        for n in (mask.q_len, mask.k_len, mask.k_len)
    )
    dout = torch.randn(2, 4, mask.q_len, 64, generator=generator, device="cuda", dtype=torch.float16)
    theirs = torch.compile(flex_attention, dynamic=False, fullgraph=True)(q, k, v, block_mask=to_flex(mask))
    ours = attention(q, k, v, mask, backend="triton")
    for a, b in zip(
        (theirs, *torch.autograd.grad(theirs, (q, k, v), dout)),
        (ours, *torch.autograd.grad(ours, (q, k, v), dout)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=4e-3 * b.detach().abs().max().item())


@pytest.mark.gpu
def test_an_exported_mask_comes_back_from_the_gpu():
    mask = FIVE["heads and batch"]().to("cuda")
    back = from_flex(to_flex(mask))
    assert back == mask and back.device.type == "cuda"


def test_lists_that_adjust_has_left_too_long_are_refused():
    whole = create_block_mask(lambda b, h, q, k: k <= q, None, None, 384, 384, device="cpu")
    part = whole._adjust(384, 256)
    if (part.kv_num_blocks + part.full_kv_num_blocks).max() <= 2:  # PyTorch 2.15 shortens the lists
        assert from_flex(part) == from_flex(whole).crop(q=(0, 384), k=(0, 256))
    else:
        with pytest.raises(ValueError, match=r"blocks of its 256 keys, 0 to 1; got 2. _adjust to fewer keys .*crop"):
            from_flex(part)


def test_lists_that_adjust_has_left_too_short_are_refused():
    whole = create_block_mask(lambda b, h, q, k: k <= q, None, None, 384, 384, device="cpu")
    said = r"lists for all 600 queries; got 3 block rows of 128. .*_adjust to longer lengths adds no lists"
    with pytest.raises(ValueError, match=said):
        from_flex(whole._adjust(600, 384))


def test_lists_that_adjust_has_cut_are_those_of_the_part():
    whole = create_block_mask(lambda b, h, q, k: k <= q, None, None, 384, 384, device="cpu")
    for q_len, k_len in ((128, 128), (256, 384), (200, 100), (100, 384)):
        assert from_flex(whole._adjust(q_len, k_len)) == from_flex(whole).crop(q=(0, q_len), k=(0, k_len))
