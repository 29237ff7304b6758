import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import and_masks, create_mask, noop_mask, or_masks

from sparseflash import BlockMask, masks
from tests.drawn.masks import blocks, lengths
from tests.watched.largest_tensor import LargestTensor

DOCUMENTS = torch.arange(300) // torch.tensor([[7], [50], [7], [1000]])
SLOPES = torch.tensor([30, 3, 30, 300, 3])


def causal(b, h, q, k):
    return k <= q


def documents(b, h, q, k):
    return DOCUMENTS[b, q] == DOCUMENTS[b, k]


def windows(b, h, q, k):
    return (q - k).abs() < SLOPES[h]


def both(b, h, q, k):
    return (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & ((q - k).abs() < SLOPES[h]) | (k == b)


def of_plain_numbers(b, h, q, k):
    return (k <= q) & (q - k < [30, 3, 30, 300, 3][int(h)])


MODS = [
    causal, documents, windows, both, of_plain_numbers, noop_mask,
    and_masks(causal, windows), or_masks(documents, windows), and_masks(or_masks(causal, both), documents),
]  # fmt: skip


@pytest.mark.parametrize("mod", MODS, ids=lambda mod: mod.__name__)
@given(st.integers(1, 4), st.integers(1, 5), lengths(120), lengths(120), blocks((16, 32, 64)))
def test_a_mask_mod_is_a_mask_for_each_batch_element_and_head(mod, batch, heads, q_len, k_len, block):
    mask = BlockMask.from_function(mod, q_len, k_len, batch=batch, heads=heads, block=block)
    mask.validate()
    assert mask.shape == (batch, heads, q_len, k_len)
    q, k = torch.arange(q_len)[:, None], torch.arange(k_len)
    want = [[mod(b, h, q, k).expand(q_len, k_len) for h in torch.arange(heads)] for b in torch.arange(batch)]
    assert mask == BlockMask.from_dense(torch.stack([torch.stack(row) for row in want]), block=block)


def test_it_is_what_flexattention_makes_of_it():
    want = create_mask(both, 3, 4, 100, 90, device="cpu")
    assert BlockMask.from_function(both, 100, 90, batch=3, heads=4, block=32) == BlockMask.from_dense(want, block=32)


@pytest.mark.parametrize(
    ("mod", "patterns"),
    [(causal, [[0] * 5] * 4), (windows, [[0, 1, 0, 2, 1]] * 4), (documents, [[0] * 5, [1] * 5, [0] * 5, [2] * 5])],
)
def test_equal_patterns_are_stored_once(mod, patterns):
    assert BlockMask.from_function(mod, 100, batch=4, heads=5, block=16).pattern.tolist() == patterns


@pytest.mark.parametrize(
    ("mod", "asked"), [(causal, 1), (windows, 5), (documents, 4), (both, 20), (of_plain_numbers, 5), (noop_mask, 1)]
)
def test_a_rule_is_asked_once_for_all_whose_number_it_does_not_look_at(mod, asked):
    calls = []

    def counted(b, h, q, k):
        calls.append(0)
        return mod(b, h, q, k)

    BlockMask.from_function(counted, 64, batch=4, heads=5, block=64)
    assert len(calls) == asked


def test_heads_alone_are_of_every_batch_element():
    assert BlockMask.from_function(windows, 100, heads=5, block=16).shape == (1, 5, 100, 100)
    assert BlockMask.from_function(documents, 100, batch=2, block=16).shape == (2, 1, 100, 100)


def test_a_rule_that_takes_two_or_four_gets_four_where_numbers_are_given():
    counts = []

    def live(*arguments):
        counts.append(len(arguments))
        return arguments[-1] <= arguments[-2]

    assert BlockMask.from_function(live, 64, block=16) == masks.causal(64, block=16)
    assert BlockMask.from_function(live, 64, heads=1, block=16) == masks.causal(64, block=16)
    assert set(counts) == {2, 4}


def test_no_more_of_a_long_mask_is_made_for_many_heads():
    def live(b, h, q, k):
        return (k <= q) & (q - k < 64 << (h % 2))

    with LargestTensor() as largest:
        BlockMask.from_function(live, 1 << 16, heads=6, block=128, candidates=lambda i, j: (i >= j) & (i - j <= 2))
    near = BlockMask.from_function(live, 1 << 16, heads=6, block=128, candidates=lambda i, j: (i >= j) & (i - j <= 2))
    assert largest.nbytes <= 8 * 2**21
    assert near.nbytes < 3 * masks.local(1 << 16, window=128, causal=True).nbytes


@pytest.mark.parametrize("combined", [and_masks(causal, windows), or_masks(causal, windows), noop_mask])
def test_a_mask_mod_that_makes_tensors_of_the_numbers_says_how_it_is_given(combined):
    with pytest.raises(
        TypeError, match=r"Pass the mask_mod itself, from_function\(mask_mod, q_len, batch=1, heads=1\)"
    ):
        BlockMask.from_function(lambda q, k: combined(0, 0, q, k), 64)


def test_other_missing_attributes_are_the_rules_own():
    with pytest.raises(AttributeError, match="'Tensor' object has no attribute 'nope'"):
        BlockMask.from_function(lambda q, k: q.nope(k), 64)


@pytest.mark.parametrize(
    ("numbers", "error", "message"),
    [
        ({"batch": 0}, ValueError, "batch must be at least 1; got 0"),
        ({"heads": -1}, ValueError, "heads must be at least 1; got -1"),
        ({"heads": 2.5}, TypeError, "heads must be an integer number of heads; got 2.5"),
        ({"batch": torch.ones(2)}, TypeError, "batch must be one integer number of batch elements"),
    ],
)
def test_numbers_that_are_none_are_refused(numbers, error, message):
    with pytest.raises(error, match=message):
        BlockMask.from_function(causal, 64, **numbers)


def test_a_rule_of_two_is_the_same_for_all_and_takes_no_numbers():
    with pytest.raises(TypeError, match=r"must take four arguments .* got a function of \(q, k\)\. Without them"):
        BlockMask.from_function(lambda q, k: k <= q, 64, heads=2)
