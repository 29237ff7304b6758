import re
import sys
import threading
import time
from cProfile import Profile
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import sparseflash
from sparseflash import BlockMask, attention, attention_varlen, masks, scores, testing, varlen
from sparseflash.blockmask import running_sums
from sparseflash.blockmask.ops.place import place
from sparseflash.interop.flash_attn import flash_attn_varlen_func
from sparseflash.pattern import mask_of_lengths
from sparseflash.scores.change import scores_of
from sparseflash.scores.positions import Packed, places_of
from sparseflash.varlen import varlen_mask
from tests.drawn.masks import SEEDS, block_masks, blocks
from tests.watched.waiting import waiting_raises


def window_rule(q, k):
    return (k <= q) & (q - k < 20)


def two_heads(q_len, k_len=None):
    return masks.per_head([masks.causal(q_len, k_len, block=16), masks.local(q_len, k_len, window=9, block=32)])


def padded(q_len, k_len=None):
    return masks.causal(q_len, k_len, block=16).with_lengths([max(1, q_len - 3)])


PATTERNS = {
    "everything": None,
    "causal": partial(masks.causal, block=(16, 32)),
    "window": partial(masks.local, window=20, causal=True, block=32),
    "rule": window_rule,
    "heads": two_heads,
    "padded": padded,
}


def dense_of(pattern, q_len, k_len):
    if pattern is None:
        return torch.ones(1, q_len, k_len, dtype=torch.bool)
    if pattern is window_rule:
        q = torch.arange(q_len)[:, None] + max(0, k_len - q_len)
        return window_rule(q, torch.arange(k_len) + max(0, q_len - k_len))[None]
    return pattern(q_len, k_len).to_dense()[0]


def block_diagonal(pattern, q_lengths, k_lengths):
    heads = 2 if pattern is two_heads else 1
    live = torch.zeros(heads, sum(q_lengths), sum(k_lengths), dtype=torch.bool)
    q_start = k_start = 0
    for q_len, k_len in zip(q_lengths, k_lengths):
        if q_len and k_len:
            live[:, q_start : q_start + q_len, k_start : k_start + k_len] = dense_of(pattern, q_len, k_len)
        q_start, k_start = q_start + q_len, k_start + k_len
    return live


def sums(lengths):
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


SIZES = st.lists(st.tuples(st.integers(0, 70) | st.integers(1, 5), st.integers(0, 70)), min_size=1, max_size=7)
SIZES = SIZES.filter(lambda sizes: any(q and k for q, k in sizes))

SHORT = st.lists(st.tuples(st.integers(0, 33), st.integers(0, 33)), min_size=1, max_size=3)
SHORT = SHORT.filter(lambda sizes: any(q and k for q, k in sizes))


@given(SIZES, st.booleans(), st.sampled_from(list(PATTERNS)))
@example([(5, 5)] * 13, True, "causal")
@example([(0, 3), (16, 16), (32, 16), (0, 0)], False, "heads")
def test_the_mask_is_block_diagonal(sizes, equal, name):
    q_lengths, k_lengths = ([size[0] for size in sizes] for _ in range(2))
    if not equal:
        k_lengths = [size[1] for size in sizes]
    elif not any(q_lengths):
        return
    mask = varlen_mask(sums(q_lengths), sums(k_lengths), PATTERNS[name], block=16)
    mask.validate()
    want = block_diagonal(PATTERNS[name], q_lengths, k_lengths)
    assert mask == BlockMask.from_dense(want, block=(mask.block_q, mask.block_k))


BLOCKS = blocks((16, 32, 128))


NESTED = {
    "causal": partial(masks.causal, offset=-2),
    "window": partial(masks.local, left=30, right=5),
    "dilated": partial(masks.dilated, window=9, dilation=3),
    "chunked": partial(masks.chunked, chunk=20, causal=True),
    "streaming": partial(masks.streaming, window=17, sink=3),
    "a_shape": partial(masks.a_shape, sink=2, local=25),
    "strided": partial(masks.strided, stride=11),
    "far": partial(masks.strided, stride=5, attend="strided"),
    "log_sparse": partial(masks.log_sparse, window=3),
    "restart": partial(masks.log_sparse, window=2, restart=37),
    "butterfly": masks.butterfly,
    "causal butterfly": partial(masks.butterfly, radix=3, causal=True, global_blocks=1),
    # Of these the length changes what the arguments mean, so a mask is made for each length.
    "a layer": partial(masks.butterfly, layer=4),
    "no factors": partial(masks.butterfly, factors=0),
    "rule": lambda q, k: (k <= q) & ((q - k) % 7 < 3),
}


@given(SIZES, st.sampled_from(list(NESTED)), BLOCKS)
@example([(300, 300), (40, 40), (1, 1), (33, 33)], "rule", (16, 32))
def test_masks_that_begin_those_of_longer_sequences_are_placed_in_parts(sizes, name, block):
    square = block if "butterfly" not in name and name not in ("a layer", "no factors") else block[0]
    pattern = NESTED[name] if name == "rule" else partial(NESTED[name], block=square)
    sums = np.cumsum([0, *(q for q, _ in sizes)]).tolist()
    lengths = [stop - start for start, stop in pairwise(sums)]
    found = varlen_mask(sums, pattern=pattern, block=block) if sums[-1] else None
    parts = [(mask_of_lengths(pattern, n, n, block=block), at, at) for n, at in zip(lengths, sums) if n]
    assert found is None or found == place(parts, sums[-1], sums[-1])


@pytest.mark.parametrize(
    "pattern", [partial(masks.local, window=20, block=32), partial(masks.butterfly, block=32), window_rule]
)
def test_masks_are_made_for_few_lengths(pattern):
    with mock.patch.object(varlen, "made_for", side_effect=varlen.made_for) as made:
        varlen_mask(np.cumsum([0, *range(1, 400)]), pattern=pattern, block=32)
    few = [399] if pattern is window_rule else [1, 3, 7, 15, 31, 63, 127, 255, 399]
    assert [call.args[2] for call in made.call_args_list] == few


FUNCTIONS = {
    "causal": lambda n: masks.causal(n, block=32),
    "streaming": lambda n: masks.streaming(n, window=17, sink=3, block=16),
    "its length is read": lambda n: masks.local(n, window=n // 2 + 1, block=16),
    "of two kinds": lambda n: (
        masks.local(n, window=9, causal=n % 2 == 1, block=16) if n % 3 else masks.dense(n, block=16)
    ),
    "two options": lambda n: masks.butterfly(n, block=16, global_blocks=1 if n % 2 else 2),
    "a union": lambda n: masks.chunked(n, chunk=8, block=16) | masks.local(n, window=5, block=16),
    "blocks of its length": lambda n: masks.local(n, window=3, block=16 if n % 2 else 32),
    "its mask is read": lambda n: masks.local(n, window=masks.causal(n, block=16).q_len // 3 + 1, block=16),
    "another length": lambda n: masks.causal(n + 1, block=16).crop(q=(0, n), k=(0, n)),
    "factors": lambda n: masks.butterfly(n, factors=min(1, (n - 1) // 16), block=16),
    "its length by name": lambda n: masks.causal(q_len=n, block=16),
    "its length by name, last": lambda n: masks.local(window=3, block=16, q_len=n),
    "no length": lambda n: masks.causal(n, k_len=None, block=16),
    "of few lengths": lambda n: _or_causal(n, lambda: masks.butterfly(n, factors=2, block=16)),
    "a window and a sink of its length": lambda n: masks.streaming(n, window=n // 3 + 1, sink=n // 5, block=16),
    "a sink for some lengths": lambda n: masks.streaming(n, window=n // 3 + 1, sink=3 * (n % 2), block=16),
    "a prefix of its length": lambda n: masks.prefix_lm(n, prefix=n // 2, block=16),
    "a chunk of its length": lambda n: masks.chunked(n, chunk=n // 4 + 1, causal=True, block=16),
    "an offset of its length": lambda n: masks.causal(n, offset=n // 3 - 9, block=16),
    "documents": lambda n: masks.documents([n // 2, n - n // 2], causal=True, block=16),
    "a block of its length": lambda n: masks.local(n, window=n // 2 + 1, block=32 if n > 20 else 16),
    "marks apart": lambda n: masks.longformer(n, window=5, global_tokens=[0, n - 1], block=16),
    "last queries": lambda n: masks.tri_shape(n, sink=1, local=n // 4, last=n // 5, block=16),
    "two heads": lambda n: masks.per_head([masks.local(n, window=n // 2 + 1, block=16), masks.causal(n, block=16)]),
    "heads of families": lambda n: masks.per_head(
        [masks.butterfly(n, block=16), masks.local(n, window=9, block=32), masks.butterfly(n, block=16)]
    ),
    "heads of its length": lambda n: masks.per_head([masks.causal(n, block=16)] * (1 + n % 2)),
    "heads that are equal at some lengths": lambda n: masks.per_head(
        [masks.local(n, window=9, block=16), masks.local(n, window=9 + n % 2, block=16)]
    ),
    "heads of heads": lambda n: masks.per_head([two_heads(n), masks.dense(n, block=16)]),
    "heads of another length": lambda n: _or_causal(
        n, lambda: masks.per_head([masks.causal(n, block=16), masks.local(n + n % 2, window=9, block=16)])
    ),
    "heads that are read": lambda n: [m := two_heads(n), m.density][0],
    "its scores are read": lambda n: [m := masks.local(n, window=n // 2 + 1, block=16), m.density][0],
    "a length below 1": lambda n: _or_causal(n, lambda: [masks.causal(n - 20), masks.dense(n, block=16)][1]),
}


def _or_causal(n, make):
    try:
        return make()
    except (TypeError, ValueError):
        return masks.causal(n, block=16)


@given(SIZES, st.sampled_from(list(FUNCTIONS)))
@example([(n, n) for n in range(1, 40)], "causal")
@example([(n, n) for n in range(1, 40)], "streaming")
@example([(40, 40), (41, 41)], "of two kinds")
@example([(40, 40), (41, 41)], "its length by name")
@example([(40, 40), (41, 41)], "its length by name, last")
@example([(40, 40), (16, 16)], "of few lengths")
@example([(40, 40), (16, 16)], "a length below 1")
@example([(40, 40), (41, 41)], "blocks of its length")
@example([(40, 40), (41, 41)], "last queries")
@example([(40, 40), (41, 41)], "marks apart")
@example([(40, 40), (41, 41)], "two heads")
@example([(40, 40), (41, 41)], "heads that are read")
@example([(40, 40), (41, 41)], "heads of another length")
@example([(40, 40), (41, 41)], "heads of heads")
@example([(40, 40), (41, 41)], "heads that are equal at some lengths")
@example([(40, 40), (41, 41)], "heads of its length")
@example([(40, 40), (41, 41)], "heads of families")
def test_a_function_of_a_length_has_the_mask_of_each_length(sizes, name):
    sums = np.cumsum([0, *(q for q, _ in sizes)]).tolist()
    lengths = [stop - start for start, stop in pairwise(sums)]
    parts = [(FUNCTIONS[name](n), at, at) for n, at in zip(lengths, sums) if n]
    assert not sums[-1] or varlen_mask(sums, pattern=FUNCTIONS[name]) == place(parts, sums[-1], sums[-1])


def test_a_function_is_called_for_each_length_and_few_of_its_masks_are_made():
    lengths, held, module = [], [], sys.modules["sparseflash.masks.streaming"]

    def pattern(length):
        lengths.append(length)
        mask = masks.streaming(length, window=7, sink=2, block=16)
        held.extend([mask] if length == 5 else [])
        return mask

    with mock.patch.object(module, "spans", side_effect=module.spans) as made:
        found = varlen_mask(np.cumsum([0, *range(1, 300)]), pattern=pattern)
    assert lengths[:299] == list(range(1, 300))
    # That of 5 is held by the function, so it is made: compiled code must not meet one that is not.
    assert made.call_count <= 11 and "indices" in vars(held[0])
    assert held[0] == masks.streaming(5, window=7, sink=2, block=16)
    assert found == varlen_mask(
        np.cumsum([0, *range(1, 300)]), pattern=partial(masks.streaming, window=7, sink=2, block=16)
    )


def test_of_masks_of_runs_none_is_made_for_a_length():
    held, band = [], sys.modules["sparseflash.masks.tiling.band"]

    def pattern(length):
        mask = masks.local(length, window=length // 2 + 1, block=16)
        held.extend([mask] if length == 5 else [])
        return mask

    sums = np.cumsum([0, *range(1, 100), *range(1, 100)])
    with mock.patch.object(band, "_made", side_effect=band._made) as made:
        found = varlen_mask(sums, pattern=pattern)
    assert made.call_count == len(held) == 1 and "indices" in vars(held[0])  # the one that the function holds
    assert held[0] == masks.local(5, window=3, block=16)
    parts = [(masks.local(n, window=n // 2 + 1, block=16), at, at) for n, at in zip(np.diff(sums).tolist(), sums)]
    assert found == place(parts, int(sums[-1]), int(sums[-1]))


def test_of_stacked_heads_each_distinct_one_is_made_once():
    band, held = sys.modules["sparseflash.masks.tiling.band"], []

    def pattern(length):
        heads = [masks.local(length, window=length // 2 + 1, block=16), masks.butterfly(length, block=16)] * 4
        stacked = masks.per_head(heads)
        held.extend([stacked] if length == 5 else [])
        heads.clear()  # a list of the function's own
        return stacked

    sums = np.cumsum([0, *range(1, 100)])
    with (
        mock.patch.object(band, "_made", side_effect=band._made) as made,
        mock.patch.object(varlen, "place", side_effect=varlen.place) as placed,
    ):
        found = varlen_mask(sums, pattern=pattern)
    assert made.call_count == placed.call_count == 1  # the window that the function holds, and the butterfly
    assert "indices" in vars(held[0]) and held[0] == pattern(5)
    assert found == place([(pattern(n), at, at) for n, at in zip(range(1, 100), sums)], int(sums[-1]), int(sums[-1]))


@pytest.mark.parametrize("function", ["local", "streaming", "chunked"])
def test_few_lengths_of_a_family_of_runs_are_made_at_once(function):
    given = {"local": {"window": 9}, "streaming": {"window": 9, "sink": 3}, "chunked": {"chunk": 20}}[function]
    pattern, sums = partial(getattr(masks, function), block=16, **given), [0, 50, 50, 83, 183]
    with mock.patch.object(varlen, "place", side_effect=varlen.place) as placed:
        found = varlen_mask(sums, pattern=pattern)
    assert not placed.called
    assert found == place([(pattern(n), at, at) for n, at in ((50, 0), (33, 50), (100, 83))], 183, 183)


def test_a_mask_that_is_made_when_it_is_read_is_read_by_several_threads():
    read = []

    def pattern(length):
        mask, ready = masks.local(length, window=3, block=16), threading.Barrier(4)

        def read_it():
            ready.wait()
            read.append(mask.q_len == length)

        readers = [threading.Thread(target=read_it) for _ in range(4)]
        for each in readers:
            each.start()
        for each in readers:
            each.join()
        return mask

    module = sys.modules["sparseflash.masks.local"]
    band = module.band
    with mock.patch.object(module, "band", lambda *args, **named: time.sleep(0.05) or band(*args, **named)):
        varlen_mask([0, 501, 1004], pattern=pattern)
    assert read == [True] * 8


def test_a_function_that_handles_errors_of_a_mask_has_them():
    def pattern(length):
        try:
            return masks.local(length, window=0)
        except ValueError:
            return masks.causal(length)

    assert varlen_mask([0, 5, 15, 20], pattern=pattern) == masks.documents([5, 10, 5], causal=True)
    with pytest.raises(ValueError, match="must return a mask of the sequence's length, 10 queries"):
        varlen_mask([0, 5, 15, 20], pattern=lambda length: masks.causal(5))


@given(block_masks(60), st.data())
def test_a_part_of_a_mask_is_placed_as_if_it_were_cropped(mask, data):
    mask = mask.select(batch=0).bake_lengths() if mask.shape[0] > 1 else mask.bake_lengths()
    parts, q_stop, k_stop = [], 0, 0
    for _ in range(data.draw(st.integers(1, 3))):
        q_len, k_len = (data.draw(st.integers(1, most)) for most in (mask.q_len, mask.k_len))
        q_start, k_start = (at + data.draw(st.integers(0, 40)) for at in (q_stop, k_stop))
        parts.append((mask, q_start, k_start, q_len, k_len))
        q_stop, k_stop = q_start + q_len, k_start + k_len
    cropped = [(mask.crop(q=(0, q_len), k=(0, k_len)), *start) for _, *start, q_len, k_len in parts]
    assert place(parts, q_stop, k_stop) == place(cropped, q_stop, k_stop)


@given(SIZES, st.booleans(), BLOCKS)
@example([(5, 5)] * 40, True, (128, 16))
def test_documents_are_the_same_placed_one_by_one(sizes, is_causal, block):
    q_lengths, k_lengths = ([size[side] for size in sizes] for side in range(2))
    rule = masks.causal if is_causal else masks.dense
    want = masks.documents(q_lengths, k_lengths, causal=is_causal, block=block)
    direct = varlen_mask(sums(q_lengths), sums(k_lengths), partial(rule, block=block))
    one_by_one = varlen_mask(sums(q_lengths), sums(k_lengths), lambda q, k=None: rule(q, k, block=block))
    assert direct == want and one_by_one == want
    if not is_causal:
        assert varlen_mask(sums(q_lengths), sums(k_lengths), block=block) == want


@pytest.mark.parametrize("pattern", [masks.causal, None, partial(masks.causal, offset=0, block=64)])
def test_a_pattern_of_the_library_makes_its_mask_for_all_sequences(pattern):
    lengths, k_lengths = [100, 3, 0, 129], [90, 5, 7, 129]
    mask = varlen_mask(sums(lengths), sums(k_lengths), pattern)
    live = torch.block_diag(*(dense_of(pattern, q, k)[0] for q, k in zip(lengths, k_lengths) if q and k))
    empty = torch.zeros(232, 7, dtype=torch.bool)
    live = torch.cat([live[:, :95], empty, live[:, 95:]], 1).bool()
    assert mask == BlockMask.from_dense(live, block=(mask.block_q, mask.block_k))


def test_no_operation_is_done_sequence_by_sequence():
    def calls(count):
        lengths = [1 + number * 37 % 90 for number in range(count)]
        profile = Profile()
        mask = profile.runcall(varlen_mask, sums(lengths), pattern=window_rule, block=32)
        assert mask.q_len == sum(lengths)
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(1800) - calls(180) < 10 * (1800 - 180)


@pytest.mark.parametrize("backend", ["blockwise", "triton"])
@given(SHORT, st.sampled_from(list(PATTERNS)), st.sampled_from([torch.float32, torch.float16]), SEEDS)
def test_each_sequence_is_exact_with_its_gradients(backend, sizes, name, dtype, seed):
    q_lengths, k_lengths = [size[0] for size in sizes], [size[1] for size in sizes]
    shapes = [(1, 2, sum(q_lengths), 16), (1, 1, sum(k_lengths), 16), (1, 1, sum(k_lengths), 16)]
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)

    def packed(q, k, v):
        out, lse = attention_varlen(
            *(x[0].transpose(0, 1) for x in (q, k, v)), sums(q_lengths), sums(k_lengths), PATTERNS[name], block=16,
            return_lse=True, backend=backend,
        )  # fmt: skip
        return out.transpose(0, 1)[None], lse[None]

    mask = BlockMask.from_dense(block_diagonal(PATTERNS[name], q_lengths, k_lengths), block=16)
    testing.assert_exact(packed, q, k, v, mask)


@pytest.mark.parametrize("call", [attention_varlen, flash_attn_varlen_func])
def test_no_gradient_is_copied_on_its_way_to_the_backward(call):
    """The gradient of an index is a copy into zeros."""
    q = torch.randn(5, 2, 16, requires_grad=True)
    for x in call(q, q, q, *[torch.tensor([0, 2, 5], dtype=torch.int32)] * 2, return_lse=True):
        names, nodes = set(), [x.grad_fn]
        while nodes:
            node = nodes.pop()
            names.add(node.name())
            nodes += [each for each, _ in node.next_functions if each is not None]
        assert not {"SelectBackward0", "SliceBackward0", "IndexBackward0"} & names, names


def test_a_mask_is_made_once_for_its_lengths_and_pattern():
    made = []

    def pattern(length):
        made.append(length)
        return masks.causal(length)

    first = varlen_mask([0, 5, 15, 20], pattern=pattern)
    assert made == [5, 10]
    assert varlen_mask(torch.tensor([0, 5, 15, 20]), pattern=pattern) is first and made == [5, 10]
    sparseflash.clear_caches()
    assert varlen_mask([0, 5, 15, 20], pattern=pattern) == first and made == [5, 10, 5, 10]


@pytest.mark.parametrize("pattern", [None, window_rule])
def test_masks_that_differ_in_anything_are_made_each(pattern):
    first = varlen_mask([0, 100, 150], pattern=pattern, block=64)
    assert (first.block_q, first.block_k) == (64, 64)
    for block in (128, (64, 128), (128, 64)):
        other = varlen_mask([0, 100, 150], pattern=pattern, block=block)
        assert (other.block_q, other.block_k) == (block if isinstance(block, tuple) else (block, block))
    assert varlen_mask([0, 100, 150], [0, 50, 150], pattern, block=64) != first
    assert varlen_mask([0, 101, 150], pattern=pattern, block=64) != first
    assert varlen_mask([0, 100, 150], pattern=pattern, block=64, device="meta").device.type == "meta"
    assert varlen_mask([0, 100, 150], pattern=pattern, block=(64, 64)) is first


def test_long_sequences_take_memory_by_their_tiles():
    lengths = [100_003] * 10
    mask = varlen_mask(sums(lengths), pattern=partial(masks.local, window=256, causal=True))
    assert mask.q_len == 1_000_030 and mask.nbytes < 8 << 20


@pytest.mark.parametrize("headwise", [False, True], ids=["tokens first", "heads first"])
def test_nested_tensors_go_in_and_come_out(headwise):
    g = torch.Generator().manual_seed(0)
    lengths = [5, 1, 17]
    q, k, v = ([torch.randn(n, heads, 16, generator=g) for n in lengths] for heads in (4, 2, 2))
    nested = [torch.nested.nested_tensor(x, layout=torch.jagged, requires_grad=True) for x in (q, k, v)]
    given_tensors = [x.transpose(1, 2) for x in nested] if headwise else nested
    out, lse = attention_varlen(*given_tensors, pattern=masks.causal, return_lse=True)
    assert out.is_nested and out.shape == given_tensors[0].shape
    packed = [torch.cat(x).requires_grad_() for x in (q, k, v)]
    want, want_lse = attention_varlen(*packed, sums(lengths), pattern=masks.causal, return_lse=True)
    if headwise:
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    assert torch.equal(out.values(), want) and torch.equal(lse.values(), want_lse.transpose(0, 1))
    gradients = torch.autograd.grad(out.values().square().sum(), nested)
    for got, wanted in zip(gradients, torch.autograd.grad(want.square().sum(), packed), strict=True):
        assert torch.equal(got.values(), wanted)


def test_parts_must_have_heads_that_fit():
    causal = masks.causal(8, block=16)
    with pytest.raises(ValueError, match="of one batch element and of 1 or 3 heads; got one of 1 batch elements and 2"):
        place([(masks.per_head([causal] * 3), 0, 0), (masks.per_head([causal] * 2), 8, 8)], 16, 16)
    with pytest.raises(ValueError, match="got one of 2 batch elements and 1 heads"):
        place([(masks.per_batch([causal] * 2), 0, 0)], 8, 8)


X = torch.zeros(10, 2, 16)
N = torch.nested.nested_tensor([X, X], layout=torch.jagged)


@pytest.mark.parametrize(
    ("tensors", "arguments", "error", "message"),
    [
        ((X[None], X, X), {}, ValueError, r"q must be a tensor of packed tokens, .*; got \[1, 10, 2, 16\]"),
        ((X, None, X), {}, ValueError, r"k must be a tensor of packed tokens, .*; got NoneType"),
        ((X, X, X), {"cu_seqlens_q": None}, TypeError, r"cu_seqlens_q must be given unless .* nested .*; got None"),
        ((X, X, X), {"cu_seqlens_q": [0, 9]}, ValueError, r"cu_seqlens_q must end with .* of q, 10; got 9"),
        ((X, X[:8], X[:8]), {}, ValueError, r"cu_seqlens_k must end with .* of k, 8; got 10"),
        ((X, X, X), {"cu_seqlens_q": [1, 10]}, ValueError, r"cu_seqlens_q must be running sums .*; got \[1, 10\]"),
        ((X, X, X), {"cu_seqlens_q": [0, 10, 5]}, ValueError, r"do not decrease; got \[0, 10, 5\]"),
        ((X, X, X), {"cu_seqlens_q": [0] * 9 + [-1]}, ValueError, r"got \[0, 0, 0, 0, 0, 0, 0, 0, \.\.\.\]"),
        ((X, X, X), {"cu_seqlens_q": [0.0, 10.0]}, TypeError, r"cu_seqlens_q must be a list of integers"),
        ((X, X, X), {"cu_seqlens_k": [0, 5, 10]}, ValueError, r"as many sequences as cu_seqlens_q, 1; got 2"),
        ((X, X, X), {"pattern": masks.causal(10)}, TypeError, r"got BlockMask\. The beginnings of a mask"),
        ((X, X, X), {"pattern": lambda b, h, q, k: k}, TypeError, r"positions \(q, k\); got one of \(b, h, q, k\)"),
        ((X, X, X), {"pattern": lambda n: None}, TypeError, r"mask must be a sparseflash BlockMask; got NoneType"),
        ((X, X, X), {"pattern": lambda n: masks.causal(9)}, ValueError, r"must return .* 10 queries .*; it .* 9 and 9"),
        ((X, X, X), {"cu_seqlens_k": [0, 0]}, ValueError, r"cu_seqlens_k must end with .* of k, 10; got 0"),
        ((X, X, X), {"cu_seqlens": [0, 10]}, TypeError, r"cu_seqlens must not be .*: it is called cu_seqlens_q\.$"),
        ((X, X, X), {"max_seqlen": 10}, TypeError, r"max_seqlen must not be given to .*: it follows from cu_seqlens_q"),
        ((N, N, N), {}, TypeError, r"cu_seqlens must not be given with nested tensors, .*; got both"),
        ((N, N, X), {"cu_seqlens_q": None}, TypeError, r"v must be a nested tensor .*; got torch\.strided of 3 dim"),
        (
            (N, N, torch.nested.nested_tensor([X[:9], X], layout=torch.jagged)),
            {"cu_seqlens_q": None},
            ValueError,
            r"k and v must have sequences of the same lengths",
        ),
    ],
)
def test_what_is_refused_and_why(tensors, arguments, error, message):
    with pytest.raises(error, match=message):
        attention_varlen(*tensors, **({"cu_seqlens_q": [0, 10]} | arguments))


def test_a_device_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match=r"device must be a torch\.device or its name, such as 'cuda'; got 'gpu'"):
        varlen_mask([0, 10], device="gpu")


@pytest.mark.gpu
def test_on_a_gpu_only_the_first_layer_waits_for_the_lengths():
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(3000, h, 64, generator=g, device="cuda").half().requires_grad_() for h in (8, 2, 2))
    cu_seqlens = torch.tensor([0, 700, 701, 1999, 3000], device="cuda", dtype=torch.int32)
    first = attention_varlen(q, k, v, cu_seqlens, pattern=masks.causal)
    torch.autograd.grad(first.float().sum(), (q, k, v))
    with waiting_raises():
        out = attention_varlen(q, k, v, cu_seqlens, pattern=masks.causal)
        gradients = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert torch.equal(out, first)
    own = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    want = attention_varlen(*own, cu_seqlens.cpu(), pattern=masks.causal, backend="reference")
    wanted = torch.autograd.grad(want.sum(), own)
    torch.testing.assert_close(out.cpu().double(), want, rtol=2e-3, atol=2e-3)
    for got, expected in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-2, atol=1e-2)


class Elsewhere(torch.Tensor):
    device = property(lambda self: torch.device("cuda"))


def test_running_sums_that_are_written_to_are_read_again():
    sums = torch.tensor([0, 30, 100]).as_subclass(Elsewhere)
    reads = []
    with pytest.MonkeyPatch.context() as patch:
        read = running_sums.integers
        patch.setattr(running_sums, "integers", lambda values, name: (reads.append(name), read(values, name))[1])
        for _ in range(2):
            assert varlen_mask(sums, block=16) == masks.documents([30, 70], block=16)
        assert len(reads) == 1
        sums[1] = 50
        assert varlen_mask(sums, block=16) == masks.documents([50, 50], block=16)
    assert len(reads) == 2


def test_sequences_of_which_none_has_both_a_query_and_a_key_give_zeros():
    q, k, v = (torch.randn(n, 2, 16, requires_grad=True) for n in (5, 7, 7))
    out, lse = attention_varlen(q, k, v, [0, 5, 5], [0, 0, 7], return_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all() and out.shape == q.shape
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert (gradient == 0).all()


@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("pattern", [None, masks.causal])
def test_without_any_query_or_any_key_there_is_nothing_to_attend_to(queries, keys, pattern):
    q, k, v = (torch.ones(n, 2, 16, requires_grad=True) for n in (queries, keys, keys))
    sums = [0, queries, queries], [0, 0, keys]
    out, lse = attention_varlen(q, k, v, *sums, pattern, return_lse=True)
    out.sum().backward()
    assert torch.equal(out, torch.zeros(queries, 2, 16)) and torch.equal(lse, torch.full((2, queries), -torch.inf))
    for x in (q, k, v):
        assert torch.equal(x.grad, torch.zeros_like(x))
    with pytest.raises(ValueError, match="at least one query and one key to make a mask; got none"):
        varlen_mask(*sums, pattern)


@pytest.mark.parametrize("changes", [None, scores.alibi(torch.ones(2)), scores.sink(torch.ones(2))], ids=str)
def test_no_sequences_give_nothing(changes):  # a rank's last batch
    q, k, v = (torch.ones(0, 2, 16, requires_grad=True) for _ in range(3))
    for sums in ([0], torch.zeros(1, dtype=torch.int32)):
        out, lse = attention_varlen(q, k, v, sums, pattern=masks.causal, scores=changes, return_lse=True)
        out.sum().backward()
        assert out.shape == q.grad.shape == k.grad.shape == v.grad.shape == (0, 2, 16) and lse.shape == (2, 0)
    with pytest.raises(ValueError, match="cu_seqlens_q must end with the number of tokens of q, 3; got 0"):
        attention_varlen(*torch.ones(3, 3, 2, 16), [0])
    with pytest.raises(ValueError, match=r"cu_seqlens_q must be running sums that begin with 0 .*; got \[\]"):
        attention_varlen(q, k, v, [])


def test_nested_tensors_of_empty_sequences_alone_give_such():
    x = torch.nested.nested_tensor([torch.ones(0, 2, 16)] * 3, layout=torch.jagged)
    assert attention_varlen(x, x, x, pattern=masks.causal).offsets().tolist() == [0, 0, 0, 0]


SUMS = {"list": [0, 20, 20, 70], "tensor": torch.tensor([0, 20, 20, 70])}


@pytest.mark.parametrize("sums", SUMS.values(), ids=SUMS)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_the_mask_has_contents_under_a_fake_mode(sums, pattern):
    sparseflash.clear_caches()
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(70, 2, 16)
        out, lse = attention_varlen(x, x, x, sums, pattern=pattern, return_lse=True)
        mask = varlen_mask(sums, pattern=pattern)
    assert out.shape == x.shape and lse.shape == (2, 70)
    sparseflash.clear_caches()
    assert mask == varlen_mask(sums, pattern=pattern)


def test_a_mask_that_was_moved_under_a_fake_mode_is_not_kept():
    sparseflash.clear_caches()
    with FakeTensorMode(allow_non_fake_inputs=True):
        varlen_mask([0, 20, 70], pattern=masks.causal, device="meta")
    assert type(varlen_mask([0, 20, 70], pattern=masks.causal, device="meta").indices) is torch.Tensor


def test_positions_that_were_moved_are_kept_for_training_and_not_from_a_fake_mode():
    sequences, meta = Packed((0, 2, 3), (0, 2, 6)), torch.device("meta")
    sparseflash.clear_caches()
    with FakeTensorMode(allow_non_fake_inputs=True):
        places_of(sequences, meta)
    assert all(type(x) is torch.Tensor for x in places_of(sequences, meta))
    sparseflash.clear_caches()
    with torch.inference_mode():
        found = places_of(sequences, meta)
    assert not any(x.is_inference() for x in found) and places_of(sequences, meta) is found


@pytest.mark.parametrize("sums", SUMS.values(), ids=SUMS)
def test_it_can_be_exported_with_lengths_that_are_constant(sums):
    class Packed(torch.nn.Module):
        def forward(self, x):
            return attention_varlen(x, x, x, sums, pattern=masks.causal)

    sparseflash.clear_caches()
    x = torch.randn(70, 2, 16)
    exported = torch.export.export(Packed(), (x,), strict=False)
    assert torch.equal(exported.module()(x), Packed()(x))


def test_lengths_without_contents_are_refused():
    x = torch.nested.nested_tensor([torch.randn(n, 2, 16) for n in (5, 9)], layout=torch.jagged)
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()) as mode:
        q, sums = torch.empty(70, 2, 16), torch.tensor([0, 20, 70])
        with pytest.raises(ValueError, match="cu_seqlens_q must have contents; got a fake tensor"):
            attention_varlen(q, q, q, sums, pattern=masks.causal)
        with pytest.raises(ValueError, match="cu_seqlens_k must have contents; got a fake tensor"):
            attention_varlen(q, q, q, [0, 20, 70], sums, pattern=masks.causal)
        fake = mode.from_tensor(x)
        with pytest.raises(ValueError, match="the offsets of q must have contents; got a fake tensor"):
            attention_varlen(fake, fake, fake, pattern=masks.causal)
    with pytest.raises(ValueError, match="the offsets of q must lie on a device that holds its contents; got the meta"):
        attention_varlen(x.to("meta"), x.to("meta"), x.to("meta"), pattern=masks.causal)


def own(score, b, h, q, k, gain, by_sequence):
    return score * gain[h] + by_sequence[b, h] * torch.sin(0.3 * q - 0.2 * k)


HEADS = 2


def of_all(change):
    return change, lambda *_: change


def packed_function(drawn, sizes):
    gain, by_sequence = drawn(HEADS), drawn(len(sizes), HEADS)
    return scores.function(own, gain, by_sequence), lambda b, *_: scores.function(own, gain, by_sequence[b : b + 1])


def along(make, *sides):
    def packed(drawn, sizes):
        totals = [sum(size[side] for size in sizes) for side in sides]
        values = drawn(1, HEADS, *totals)

        def of_one(_, *slices):
            return make(values[(slice(None), slice(None), *(slices[side] for side in sides))])

        return make(values), of_one

    return packed


CHANGES = {
    "temperature": lambda drawn, _: of_all(scores.temperature(drawn(HEADS, low=0.5))),
    "softcap": lambda *_: of_all(scores.softcap(1.5)),
    "alibi": lambda drawn, _: of_all(scores.alibi(drawn(HEADS))),
    "log_decay": lambda drawn, _: of_all(scores.log_decay(drawn(HEADS))),
    "t5": lambda drawn, _: of_all(scores.relative(drawn(HEADS, 8), scores.t5_buckets(8, 20))),
    "table": lambda drawn, sizes: of_all(
        scores.relative(drawn(HEADS, 2 * max(map(max, sizes))), lambda x: x + max(map(max, sizes)))
    ),
    "key_bias": along(scores.key_bias, 1),
    "temperature of queries": along(lambda x: scores.temperature(x.abs() + 0.5), 0),
    "bias": along(scores.bias, 0, 1),
    "sink": lambda drawn, _: of_all(scores.sink(drawn(HEADS))),
    "function": packed_function,
}  # fmt: skip
SIZES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=4)


@given(
    kinds=st.lists(st.sampled_from([*CHANGES]), min_size=1, max_size=3, unique=True), sizes=SIZES, seed=SEEDS,
    pattern=st.sampled_from(["everything", "causal", "rule", "heads"]), same=st.booleans(),
    backend=st.sampled_from(["blockwise", "reference", "triton"]),
)  # fmt: skip
@example(["t5"], [(0, 0)], 0, "everything", False, "blockwise")
@example(["alibi"], [(1, 9), (3, 5)], 0, "everything", False, "triton")
@example(["alibi"], [(9, 0), (3, 5)], 0, "causal", True, "blockwise")
@example(["table"], [(9, 2), (3, 5)], 0, "everything", False, "triton")
@example(["alibi", "t5", "function"], [(9, 0), (2, 20)], 0, "everything", False, "triton")
@example(["function", "sink"], [(4, 4), (7, 7)], 0, "causal", True, "triton")
@np.errstate(over="ignore", invalid="ignore")
def test_changes_of_scores_see_each_sequence_as_a_call_of_its_own(kinds, sizes, seed, pattern, same, backend):
    sizes = [(k_len, k_len) for _, k_len in sizes] if same else sizes
    kinds = [kind for kind in CHANGES if kind in kinds]
    for one, other in (("alibi", "log_decay"), ("t5", "table"), ("temperature", "temperature of queries")):
        if one in kinds and other in kinds:
            kinds.remove(other)
    dtype = torch.float32 if backend == "triton" else torch.float64
    generator, learned = torch.Generator().manual_seed(seed), []

    def drawn(*shape, low=None):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        learned.append((x if low is None else x.abs() + low).to(dtype).requires_grad_())
        return learned[-1]

    totals = [sum(size[side] for size in sizes) for side in (0, 1)]
    q, k, v = drawn(totals[0], HEADS, 16), drawn(totals[1], 1, 16), drawn(totals[1], 1, 16)
    made = [CHANGES[kind](drawn, sizes) for kind in kinds]

    def joined(changes):
        first, *others = changes
        for each in others:
            first = first + each
        return first

    q_sums, k_sums = ([sum(size[side] for size in sizes[:n]) for n in range(len(sizes) + 1)] for side in (0, 1))
    out, lse = attention_varlen(
        q, k, v, q_sums, k_sums, PATTERNS[pattern], scores=joined(each for each, _ in made), return_lse=True,
        backend=backend,
    )  # fmt: skip
    outs, lses = [], []
    for number in range(len(sizes)):
        of_q, of_k = (slice(sums[number], sums[number + 1]) for sums in (q_sums, k_sums))
        one = [x[of_].transpose(0, 1)[None] for x, of_ in ((q, of_q), (k, of_k), (v, of_k))]
        live = dense_of(PATTERNS[pattern], *sizes[number])[None] if all(sizes[number]) else None
        mask = None if live is None else BlockMask.from_dense(live, block=16)
        changes = joined(of_one(number, of_q, of_k) for _, of_one in made)
        found = attention(
            *(x.double() for x in one), mask, scores=wide_of(changes), return_lse=True, backend="reference"
        )
        outs.append(found[0][0].transpose(0, 1))
        lses.append(found[1][0])
    truth = torch.cat(outs), torch.cat(lses, 1)
    dout, dlse = torch.randn(out.shape, generator=generator), torch.randn(lse.shape, generator=generator)
    got, want = (
        [
            *results,
            *torch.autograd.grad(results, learned, (dout.to(results[0]), dlse.to(results[1])), allow_unused=True),
        ]
        for results in ((out, lse), truth)
    )
    tolerance = 2e-5 if backend == "triton" else 1e-10
    for mine, theirs in zip(got, want, strict=True):
        if mine is None or theirs is None:
            assert not (mine is not None and mine.any()) and not (theirs is not None and theirs.any())
            continue
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=tolerance, atol=10 * tolerance)


def wide_of(changes):
    changes = scores_of(changes)
    return changes.with_tensors([x.double() for x in changes.tensors()])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (scores.function(own, torch.ones(2), torch.ones(2, 2), kernel=object()), ValueError,
         "scores.function must be given without kernel= for packed sequences, where a kernel would get places among "
         "all packed tokens; pass the PyTorch function alone."),
        (scores.relative_2d(torch.zeros(2, 3, 5), 2, 3), ValueError,
         "every sequence must be one or several whole grids of 6 tokens; got one of 5. Say with cells= where each "
         "packed token lies."),
        (scores.key_bias(torch.zeros(2, 1, 12)), ValueError,
         "key_bias must have shape [B, Hq, Nk], here [1, 2, 12] or 1 instead; got [2, 1, 12]."),
        (torch.zeros(2), TypeError,
         "scores must be made by sparseflash.scores, such as scores.alibi(slopes); got Tensor."),
    ],
)  # fmt: skip
def test_changes_of_scores_that_do_not_fit_packed_sequences_are_refused(changes, error, message):
    q = torch.zeros(12, 2, 16)
    with pytest.raises(error, match="^" + re.escape(message)):
        attention_varlen(q, q, q, [0, 5, 12], scores=changes)


def test_a_pattern_may_change_what_it_captures():
    q, k, v = torch.randn(3, 100, 2, 16, generator=torch.Generator().manual_seed(0))
    window, document = 8, torch.arange(100) // 20

    def near(i, j):
        return (i - j).abs() < window

    def alike(i, j):
        return document[i] == document[j]

    def one_row(rule):
        return attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), BlockMask.from_function(rule, 100))[0]

    for _ in range(2):
        for rule in (near, alike):
            out = attention_varlen(q, k, v, [0, 100], pattern=rule)
            torch.testing.assert_close(out.transpose(0, 1), one_row(rule))
        window = 3
        document.copy_(torch.arange(100) // 9)


def test_methods_and_objects_that_say_what_they_equal_keep_their_masks():
    class Window:
        def __init__(self, width):
            self.width = width

        def rule(self, i, j):
            return (i - j).abs() < self.width

    @dataclass(frozen=True)
    class Equal:
        width: int

        def __call__(self, i, j):
            return (i - j).abs() < self.width

    @dataclass(frozen=True)
    class Alike:
        document: torch.Tensor

        def __call__(self, i, j):
            return self.document[i] == self.document[j]

    alike = Alike(torch.arange(30) // 5)
    before = varlen_mask([0, 30, 50], pattern=alike)
    assert varlen_mask([0, 30, 50], pattern=Alike(alike.document)) is before
    alike.document.copy_(torch.arange(30) // 3)
    assert varlen_mask([0, 30, 50], pattern=alike) == varlen_mask([0, 30, 50], pattern=alike.__call__) != before
    window = Window(5)
    first = varlen_mask([0, 30, 50], pattern=window.rule)
    assert varlen_mask([0, 30, 50], pattern=window.rule) is first
    assert varlen_mask([0, 30, 50], pattern=Equal(5)) == first
    assert varlen_mask([0, 30, 50], pattern=Equal(5)) is varlen_mask([0, 30, 50], pattern=Equal(5))
    window.width = 3
    assert varlen_mask([0, 30, 50], pattern=window.rule) == varlen_mask([0, 30, 50], pattern=Equal(3)) != first


def test_a_function_of_both_lengths_is_told_from_a_rule():
    q = torch.zeros(12, 2, 16)
    of_lengths = [
        lambda q_len, k_len: masks.local(q_len, k_len, window=8),
        lambda q_len, k_len: BlockMask.from_dense(torch.ones(q_len, k_len, dtype=torch.bool)),
        lambda q_len, k_len: masks.per_head([BlockMask.dense(q_len, k_len)] * 2),
        lambda q_len, k_len: {(5, 5): masks.causal(5), (7, 7): masks.causal(7)}[q_len, k_len],
    ]
    for pattern in of_lengths:
        with pytest.raises(TypeError, match=r"a rule of positions; got one that returns a mask.* lambda \*lengths:"):
            attention_varlen(q, q, q, [0, 5, 12], pattern=pattern)
        assert varlen_mask([0, 5], pattern=lambda *n, made=pattern: made(n[0], n[-1])) == pattern(5, 5)
    table = torch.zeros(4)
    with pytest.raises(IndexError, match="out of"):  # a rule keeps its own error
        attention_varlen(q, q, q, [0, 5, 12], pattern=lambda i, j: table[i] == table[j])
    with pytest.raises(TypeError, match="must be boolean"):
        attention_varlen(q, q, q, [0, 5, 12], pattern=lambda i, j: i - j)


def test_objects_without_a_hash_are_patterns():
    @dataclass
    class Window:
        width: int

        def __call__(self, i, j):
            return (i - j).abs() < self.width

    @dataclass(frozen=True)
    class Widest:
        widths: list

        def __call__(self, i, j):
            return (i - j).abs() < max(self.widths)

    widest = Widest([2, 5])
    assert varlen_mask([0, 30, 50], pattern=widest) == varlen_mask([0, 30, 50], pattern=Window(5))
    widest.widths.append(7)
    assert varlen_mask([0, 30, 50], pattern=widest) == varlen_mask([0, 30, 50], pattern=Window(7))
    pattern = Window(5)
    first = varlen_mask([0, 30, 50], pattern=pattern)
    assert (
        varlen_mask([0, 30, 50], pattern=pattern)
        is first
        == varlen_mask([0, 30, 50], pattern=lambda q, k: (q - k).abs() < 5)
    )
    pattern.width = 3
    assert varlen_mask([0, 30, 50], pattern=pattern) == varlen_mask([0, 30, 50], pattern=Window(3)) != first


def test_a_misspelt_option_of_a_partial_is_named():
    for sums in ([0, 30], [0, 30, 30]):
        with pytest.raises(TypeError, match=r"chunked must be given .*chunk=.*; got chunks=\.$"):
            varlen_mask(sums, pattern=partial(masks.chunked, chunks=5))
