import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, masks
from sparseflash.blockmask.number import Number
from tests.drawn.rule_spellings import BATCH, HEADS, Data, by_numbers, data_rules, python_rules, spelled

LENGTH = 20
DATA = Data(0, LENGTH)
ALL = data_rules(DATA) | python_rules(DATA)
NUMBERS = np.arange(LENGTH) * 7 % 11


@pytest.mark.parametrize("name", ALL)
def test_every_spelling_is_asked_as_if_with_single_numbers(name):
    mask = BlockMask.from_function(ALL[name], 18, LENGTH, batch=BATCH, heads=HEADS, block=16)
    assert torch.equal(mask.to_dense(), by_numbers(ALL[name], BATCH, HEADS, 18, LENGTH))


@given(
    rule=spelled(LENGTH), batch=st.integers(1, BATCH), heads=st.integers(1, HEADS),
    lengths=st.tuples(st.integers(1, LENGTH), st.integers(1, LENGTH)), block=st.sampled_from([16, (16, 32)]),
)  # fmt: skip
def test_drawn_rules_are_asked_as_if_with_single_numbers(rule, batch, heads, lengths, block):
    mask = BlockMask.from_function(rule, *lengths, batch=batch, heads=heads, block=block)
    assert torch.equal(mask.to_dense(), by_numbers(rule, batch, heads, *lengths))


TABLE, LABELS, POINTS, SOME = DATA.table[0], DATA.labels, DATA.points, DATA.some


def seeded(q, k):
    table = torch.rand(LENGTH, generator=torch.Generator().manual_seed(3))
    return table[q] < table[k]


PAIRS = {
    "seeded numbers": seeded,
    "m[q][k]": lambda q, k: TABLE[q][k],
    "m[q, :][k]": lambda q, k: TABLE[q, :][k],
    "(m[q] & m[k]).any()": lambda q, k: (LABELS[q] & LABELS[k]).any(),
    "x, y = m[q]": lambda q, k: sum(POINTS[q]) > sum(POINTS[k]),
    "m[q].max()": lambda q, k: POINTS[q].max() == POINTS[k].min(),
    "(q == some).any()": lambda q, k: (q == SOME).any() | (k == SOME).any(),
    "isin": lambda q, k: torch.isin(q, SOME) | torch.isin(k, SOME),
    "q.max()": lambda q, k: (k < q.max()) & (q.sum() % 2 == 0),
    "q.shape": lambda q, k: torch.zeros(q.shape) < k,
    "k alone": lambda q, k: k.new_tensor([[3]]) < k,
}


@pytest.mark.parametrize("name", PAIRS)
def test_positions_are_single_numbers_too(name):
    rule = PAIRS[name]
    wanted = by_numbers(lambda b, h, q, k: rule(q, k), 1, 1, 18, LENGTH)
    assert torch.equal(BlockMask.from_function(rule, 18, LENGTH, block=16).to_dense(), wanted)


def test_block_numbers_of_candidates_are_single_numbers_too():
    table, labels = torch.rand(5, 5) < 0.5, torch.rand(5, 3) < 0.5
    for rule in (
        lambda i, j: table[i][j],
        lambda i, j: (labels[i] & labels[j]).any(),
        lambda i, j: torch.isin(i, torch.tensor([1, 3])),
        lambda i, j: True,
    ):
        mask = BlockMask.from_function(lambda q, k: k < 99, 80, block=16, candidates=rule)
        assert torch.equal(mask.to_layout(), by_numbers(lambda b, h, i, j, rule=rule: rule(i, j), 1, 1, 5, 5))


@pytest.mark.parametrize(
    "rule",
    [
        lambda q, k: torch.from_numpy(NUMBERS[q.numpy()] <= NUMBERS[k.numpy()]),
        lambda q, k: torch.from_numpy(np.isin(k.numpy(), [3, 7])) | (k <= q),
        lambda q, k: NUMBERS[q.numpy()] <= NUMBERS[k.numpy()],
    ],
)
def test_a_rule_in_numpy_for_arrays_serves(rule):
    mask = BlockMask.from_function(rule, 18, LENGTH, block=16)
    wanted = [[bool(torch.as_tensor(rule(q[None], k[None]))) for k in torch.arange(LENGTH)] for q in torch.arange(18)]
    assert mask.to_dense()[0, 0].tolist() == wanted


def test_a_table_that_is_too_short_says_so():
    for rule in (lambda q, k: SMALL[:5][q] > k, lambda q, k: SMALL[:5].take(k) > q):
        with pytest.raises(IndexError, match=r"index 5 is out of bounds|out of range"):
            BlockMask.from_function(rule, LENGTH, block=16)


SMALL, LARGE = torch.arange(LENGTH).to(torch.int8), torch.tensor(300)


@pytest.mark.parametrize(
    "rule",
    [
        lambda b, h, q, k: torch.where(k <= q, SMALL[q], LARGE) > 200,
        lambda b, h, q, k: SMALL[q].where(k <= q, h + 300) > 300,
        lambda b, h, q, k: SMALL[q].clamp(min=LARGE) + k > 310,
        lambda b, h, q, k: torch.clamp(SMALL[q], h, h + 1) * 100 > k,
        lambda b, h, q, k: torch.addcmul(SMALL[q], SMALL[k], LARGE) > 500,
        lambda b, h, q, k: (
            torch.where(k <= q, SMALL[q].half(), torch.tensor(0.1)).double() == torch.tensor(0.1).double()
        ),
        lambda b, h, q, k: (torch.where(SMALL[:3] > 1, SMALL[q], LARGE) > 200).any() | (k <= q),
        lambda b, h, q, k: torch.where(k <= q, torch.tensor(True), LARGE) == 1,
    ],
)
def test_numbers_of_two_dtypes_have_the_result_of_single_numbers(rule):
    mask = BlockMask.from_function(rule, 18, LENGTH, batch=2, heads=2, block=16)
    assert torch.equal(mask.to_dense().expand(2, 2, 18, LENGTH), by_numbers(rule, 2, 2, 18, LENGTH))


def test_a_rule_for_arrays_must_answer_for_each_pair_as_for_one():
    def in_one(q, k):
        return (LABELS[q].nonzero()[:, -1] == 1).any() & (k <= q)

    with pytest.raises(
        TypeError, match=r"live must be a function of single numbers that .* vmap raised RuntimeError: vmap"
    ):
        BlockMask.from_function(in_one, LENGTH, block=16)
    with pytest.raises(TypeError, match=r"candidates must be a function of single numbers"):
        BlockMask.from_function(lambda q, k: k <= q, LENGTH * 16, block=16, candidates=in_one)
    with pytest.raises(TypeError, match=r"live must be a function .*vmap: called random operation"):
        BlockMask.from_function(lambda q, k: torch.rand_like(q * k, dtype=torch.float32) < 0.5, LENGTH, block=16)
    with pytest.raises(ValueError, match=r"live must return one answer for single numbers; got shape \[4\]"):
        BlockMask.from_function(lambda q, k: LABELS[q], LENGTH, block=16)
    with pytest.raises(TypeError, match=r"live must be a function of single numbers"):
        BlockMask.from_function(lambda q, k: torch.ones(q.shape[0], q.shape[1], k.shape[2]) > 0, LENGTH, block=16)


READS = {
    "nothing": (lambda b, h, q, k: k <= q, 1),
    "its kind": (lambda b, h, q, k: (k <= q) & h.new_ones((), dtype=torch.bool) & (torch.zeros_like(b) == 0), 1),
    "its device": (lambda b, h, q, k: torch.tensor(True, device=h.device) & (h.ndim == 0), 1),
    "the batch element": (lambda b, h, q, k: k <= q + b, 3),
    "the head": (lambda b, h, q, k: k <= q + 0 * h, 4),
    "both": (lambda b, h, q, k: k <= q + b * h, 12),
    "the head of the first batch element": (lambda b, h, q, k: k <= (q + h if b == 0 else q), 6),
    "the batch element of the first head": (lambda b, h, q, k: k <= (q + b if h == 0 else q), 6),
}


@pytest.mark.parametrize("name", READS)
def test_a_rule_is_asked_once_for_each_number_that_it_reads(name):
    rule, asked = READS[name]
    calls = []

    def counted(*numbers):
        calls.append(0)
        return rule(*numbers)

    mask = BlockMask.from_function(counted, 16, batch=3, heads=4, block=16)
    assert len(calls) == asked
    assert torch.equal(mask.to_dense(), by_numbers(rule, 3, 4, 16, 16))


@pytest.mark.parametrize(
    "read",
    [
        int, float, bool, str, repr, "{}".format, "%d".__mod__, [1, 2, 3].__getitem__, torch.Tensor.item, range,
        lambda n: n == 1, lambda n: n in (5, 1), lambda n: {**{}, 1: n}[1] + 1, lambda n: 1 << n, lambda n: n.view(1),
        torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.data_ptr, torch.Tensor.detach, torch.Tensor.clone,
        lambda n: torch.tensor([n, n]), lambda n: torch.stack([n]), lambda n: torch.arange(4)[n:], lambda n: n.data,
        lambda n: torch.ones(2, 2).select(0, n), lambda n: torch.full((2,), n), lambda n: torch.arange(n),
        lambda n: n.as_subclass(torch.Tensor), lambda n: torch.zeros(3)[n], lambda n: n.new_full((), n),
        lambda n: torch.vmap(lambda x: x + n)(torch.arange(3)), lambda n: torch.equal(n, n),
        lambda n: n.untyped_storage(),
        lambda n: __import__("copy").deepcopy(n), lambda n: __import__("pickle").dumps(n), lambda n: n.__dlpack__(),
        lambda n: __import__("numpy").asarray(n),
    ],
)  # fmt: skip
def test_no_way_to_read_a_number_goes_unnoticed(read):
    number = Number(1)
    read(number)
    assert number.is_read


def test_threads_may_make_masks_together():
    from concurrent.futures import ThreadPoolExecutor

    allowed = torch._C._functorch._is_vmap_fallback_enabled()
    rule = ALL["docs[b].take(q)"]
    wanted = by_numbers(rule, BATCH, HEADS, 18, LENGTH)
    with ThreadPoolExecutor(4) as threads:
        made = threads.map(
            lambda _: BlockMask.from_function(rule, 18, LENGTH, batch=BATCH, heads=HEADS, block=16), range(20)
        )
        assert all(torch.equal(mask.to_dense(), wanted) for mask in made)
    assert torch._C._functorch._is_vmap_fallback_enabled() == allowed


def test_other_threads_may_use_vmap_while_a_mask_is_made():
    """PyTorch's switch for operations without a batching rule holds for all threads."""
    found = []

    def rule(q, k):
        found.append(torch._C._functorch._is_vmap_fallback_enabled())
        return k <= q

    BlockMask.from_function(rule, 64, block=16)
    assert found and all(found)


def test_an_operation_without_a_batching_rule_is_not_called_for_each_score():
    calls = []

    @torch.library.custom_op("sparseflash_tests::distance", mutates_args=())
    def distance(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        return q - k

    for rule in (lambda q, k: distance(q, k) >= 0, lambda q, k: distance(q, q + 1) + 1 + q >= k):
        calls.clear()
        assert BlockMask.from_function(rule, 256) == masks.causal(256)
        assert 0 < len(calls) < 256


@pytest.mark.parametrize("depends", [
    lambda q, k: (q < q.max()) | (k != 7), lambda q, k: (k > k.min()) | (q != 900), lambda q, k: k <= q.sort(1).values,
    lambda q, k: k.flip(-1) <= q, lambda q, k: q.double().mean() >= k,
])  # fmt: skip
def test_an_array_whose_numbers_depend_on_one_another_is_refused(depends):
    def uncalled(k):
        return torch.from_numpy(np.isin(k.numpy(), [0, 5, 900]))

    with pytest.raises(TypeError, match="live must be a function of single numbers"):
        BlockMask.from_function(lambda q, k: uncalled(k) | (k <= q) & depends(q, k), 1000, block=64)


def test_isin_serves():
    some = torch.tensor([0, 5, 900])
    mask = BlockMask.from_function(lambda q, k: torch.isin(k, some) | (k <= q), 1000, block=64)
    q, k = torch.arange(1000)[:, None], torch.arange(1000)
    assert torch.equal(mask.to_dense()[0, 0], (k == 0) | (k == 5) | (k == 900) | (k <= q))
