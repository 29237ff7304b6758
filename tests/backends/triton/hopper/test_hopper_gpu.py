"""A kernel that hangs cannot be interrupted: a test's time limit ends the process."""

import itertools
import random
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, attention, explain, masks, scores, testing
from sparseflash.backends.triton.architecture import multiprocessors
from sparseflash.backends.triton.hopper import backward_pass, choices
from sparseflash.backends.triton.hopper.configs import BLOCK, HEAD_DIMS
from sparseflash.scores.change import Scores
from tests.backends.triton.hopper.hopper_problems import fixed_among, wide
from tests.backends.triton.plans import plan
from tests.compared.exactness import LARGE_SCORES, check, check_weights_of_one, gradients_by, time_for_examples
from tests.compared.scored import Scored
from tests.compared.scored import check as check_changed
from tests.drawn.counts import examples_times
from tests.drawn.problems import problems
from tests.watched.waiting import assert_replays_as_called

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]
drawn_for_long = pytest.mark.timeout(time_for_examples(120), method="thread")
HALF = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def needs_hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a GPU of compute capability 9")


@drawn_for_long
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", HALF, ids=["fp16", "bf16"])
@examples_times(2 / 3)
@given(data=st.data())
def test_exact_on_the_gpu(dim, dtype, data):
    drawn = problems(
        most_tokens=1500, most_batch=3, head_dims=(dim,), value_dims=(dim,), blocks=(128, 128, 64, 32), dtypes=(dtype,)
    )
    check(data.draw(drawn), "hopper", "cuda")


OTHER_DIMS = [
    (16, 16), (32, 32), (48, 48), (40, 72), (80, 80), (64, 128), (144, 64), (160, 160), (64, 256), (192, 128),
    (192, 192), (256, 256),
]  # fmt: skip


@drawn_for_long
@pytest.mark.parametrize("dims", OTHER_DIMS, ids=str)
@examples_times(1 / 3)
@given(data=st.data())
def test_other_head_dims_are_exact_on_the_gpu(dims, data):
    drawn = problems(
        most_tokens=1500, most_batch=3, head_dims=dims[:1], value_dims=dims[1:], blocks=(128, 128, 64, 32), dtypes=HALF
    )
    check(data.draw(drawn), "hopper", "cuda")


@pytest.mark.parametrize("dims", OTHER_DIMS, ids=str)
def test_so_are_rows_and_columns_in_parts_with_the_same_bits_every_time(dims):
    tokens = 12_800
    g = torch.Generator(device="cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, 1, tokens, dim, generator=g, device="cuda", dtype=torch.bfloat16) for dim in (*dims[:1], *dims)
    )
    mask = masks.streaming(tokens, window=128, sink=128, block=128).to("cuda")

    def ours(q, k, v):
        return attention(q, k, v, mask, return_lse=True, backend="hopper")

    found = testing.compare(ours, q, k, v, mask)
    assert found.exact, found
    repeats = []
    for _ in range(20):
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = ours(*given)
        repeats.append((out, lse, *torch.autograd.grad(out, given, torch.ones_like(out))))
    assert all(torch.equal(x, y) for each in repeats for x, y in zip(each, repeats[0], strict=True))


SMALL_DIMS = [(64, 64), (96, 96), (128, 128), (16, 16), (32, 48), (80, 128)]


@drawn_for_long
@pytest.mark.parametrize("dims", SMALL_DIMS, ids=str)
@examples_times(1 / 2)
@given(data=st.data())
def test_the_backward_in_tiles_of_64_is_exact_on_the_gpu(dims, data):
    drawn = problems(most_tokens=1500, most_batch=3, head_dims=dims[:1], value_dims=dims[1:], blocks=(64,), dtypes=HALF)
    with mock.patch.object(choices, "MOST_FILLED", {128: 2.0}):
        check(data.draw(drawn), "hopper", "cuda")


@pytest.mark.parametrize("dims", SMALL_DIMS, ids=str)
def test_so_are_scattered_blocks_of_64_and_cut_columns_with_the_same_bits_every_time(dims):
    tokens = 12_800 - 40
    g = torch.Generator(device="cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, 2, tokens, dim, generator=g, device="cuda", dtype=torch.bfloat16) for dim in (*dims[:1], *dims)
    )
    layout = torch.rand(200, 200, generator=torch.Generator().manual_seed(1)) < 0.02
    layout[:, 0] = True
    layout |= torch.eye(200, dtype=torch.bool)
    mask = BlockMask.from_layout(layout, block=64, q_len=tokens, k_len=tokens).to("cuda")
    found = explain(q, k, v, mask, backend="hopper").kernels
    assert [each.kernel for each in found] == ["forward", "dk and dv", "dq"] and found[1].chunks

    def ours(q, k, v):
        return attention(q, k, v, mask, return_lse=True, backend="hopper")

    found = testing.compare(ours, q, k, v, mask)
    assert found.exact, found
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    busy, other, repeats = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream(), []
    for _ in range(40):
        with torch.cuda.stream(other):
            busy @ busy
        out, lse = ours(*given)
        repeats.append((out, lse, *torch.autograd.grad(out, given, torch.ones_like(out))))
    assert all(torch.equal(x, y) for each in repeats for x, y in zip(each, repeats[0], strict=True))


@pytest.mark.parametrize(("queries", "keys", "heads", "kv_heads"), [(300, 40_000, 2, 1), (64, 9000, 4, 4)])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_gradients_of_few_queries_are_exact_with_the_same_bits_every_time(dim, queries, keys, heads, kv_heads):
    q, _, _, dout, _ = inputs(1, heads, queries, dim)
    _, k, v, _, _ = inputs(1, kv_heads, keys, dim)

    def ours(q, k, v):
        return attention(q, k, v, return_lse=True, backend="hopper")

    testing.assert_exact(ours, q, k, v, heads=1, blocks=4)
    out, _ = ours(q, k, v)
    first, *others = (torch.autograd.grad(out, (q, k, v), dout, retain_graph=True) for _ in range(20))
    assert all(torch.equal(x, y) for each in others for x, y in zip(each, first, strict=True))


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("largest", LARGE_SCORES)
def test_gradients_of_large_scores(largest, dim, backend):
    check_weights_of_one(largest, gradients_by(backend), dim, "cuda")


CHANGED = [
    ("softcap",), ("alibi",), ("log_decay",), ("sink",), ("softcap", "alibi", "sink"), ("log_decay", "softcap"),
    ("t5",), ("clipped", "sink"), ("key_bias",), ("alibi", "key_bias", "sink"),
]  # fmt: skip


@drawn_for_long
@pytest.mark.parametrize("kinds", CHANGED, ids="+".join)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@examples_times(1 / 4)
@given(data=st.data())
def test_changed_scores_are_exact_on_the_gpu(dim, kinds, data):
    drawn = problems(
        most_tokens=1500, most_batch=3, head_dims=(dim,), value_dims=(dim,), blocks=(128, 128, 64, 32), dtypes=HALF
    )
    shared, half = data.draw(st.booleans()), data.draw(st.booleans())
    check_changed(Scored(data.draw(drawn), kinds, shared, half, fixed_among(kinds)), "hopper", "cuda")


@drawn_for_long
@pytest.mark.parametrize("dim", HEAD_DIMS)
@examples_times(1 / 2)
@given(data=st.data())
def test_biases_of_pairs_are_exact_on_the_gpu(dim, data):
    drawn = problems(
        most_tokens=1500, most_batch=3, head_dims=(dim,), value_dims=(dim,), blocks=(128, 128, 64, 32), dtypes=HALF
    ).filter(lambda problem: problem.q_len > 1)  # with one query it is a bias of keys
    problem = data.draw(drawn)
    shared, others = data.draw(st.booleans()), data.draw(st.sampled_from([(), ("sink",)]))
    mask = problem.mask
    in_tiles = mask is not None and (mask.block_q, mask.block_k) == BLOCK
    for kind in ("aligned bias", *(["tile bias"] if in_tiles else [])):
        which = {"fixed": (kind,)} if shared else {"own": (kind,)}
        check_changed(Scored(problem, (kind, *others), shared, half=True, **which), "hopper", "cuda")


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", HALF, ids=["fp16", "bf16"])
def test_biases_of_pairs_may_have_anything_where_scores_are_dead(dim, dtype):
    q, k, v, dout, dlse = inputs(2, 2, 1000, dim, dtype)
    ends = torch.tensor([1000, 700], device="cuda")
    mask = masks.causal(1000, block=128).to("cuda").with_lengths(ends)
    past = torch.arange(1000, device="cuda") >= ends.view(-1, 1, 1)
    later = torch.ones(1000, 1000, dtype=torch.bool, device="cuda").triu(1)
    is_dead, values = later | past[..., None] | past[..., None, :], torch.randn(2, 2, 1000, 1000, device="cuda")
    found = []
    for fill in (0.0, torch.nan):
        bias = scores.bias(values.masked_fill(is_dead, fill).to(dtype).requires_grad_())
        found.append(results(q, k, v, mask, dout, dlse, Scores((bias,))))
    assert all(map(torch.equal, *found)) and all(x.isfinite().logical_or(x.isneginf()).all() for x in found[0])


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", ["bias", "key_bias", "alibi and key_bias"])
@pytest.mark.parametrize("value", [-1e9, -1e30, -1e38, torch.finfo(torch.bfloat16).min])
def test_padding_by_the_lowest_bias(dim, kind, value):
    """The first queries see padded keys alone; their dout is 0."""
    q, k, v, dout, dlse = inputs(1, 2, 1000, dim)
    dout[:, :, :200], dlse = 0.0, torch.zeros_like(dlse)
    mask = masks.causal(1000, block=128).to("cuda")
    seen = BlockMask.from_function(lambda q, k: (k <= q) & (k >= 200), 1000, block=128).to("cuda")
    others = scores.alibi(torch.tensor([0.5, 0.1], device="cuda")) if "alibi" in kind else None
    dtype = torch.bfloat16 if kind == "bias" else torch.float32
    values = torch.zeros(1, 2, 1000, 1000, device="cuda", dtype=dtype)
    values[..., :200] = value
    padding = scores.bias(values) if kind == "bias" else scores.key_bias(values[:, :, 0].contiguous())
    changes = Scores((padding,)) if others is None else padding + others
    found = results(q, k, v, mask, dout, dlse, changes)
    wanted = results(q, k, v, seen, dout, dlse, others and Scores((others,)))
    assert all(x.isfinite().all() for x in found)
    for x, y in zip((found[0], *found[2:]), (wanted[0], *wanted[2:]), strict=True):
        torch.testing.assert_close(x[:, :, 200:], y[:, :, 200:], rtol=1e-2, atol=1e-2)
    if value > -1e37:  # beyond, some reach the lowest bias of the kernels
        lse = found[1][:, :, :200]
        torch.testing.assert_close(lse, torch.full_like(lse, values.min().item()), rtol=1e-6, atol=0)
    if value < -1e20:
        mean = v[:, :, :200].float().cumsum(2) / torch.arange(1, 201, device="cuda")[:, None]
        torch.testing.assert_close(found[0][:, :, :200], mean.bfloat16(), rtol=1e-2, atol=1e-2)
    assert not found[2][:, :, :200].any()


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", ["capped", "learned decay", "table", "key_bias", "bias", "tile_bias"])
def test_changed_scores_have_the_same_bits_at_every_launch_and_replay(dim, kind):
    q, k, v, dout, dlse = inputs(2, 8, 4000, dim)
    mask = masks.causal(4000, block=128).to("cuda").with_lengths(torch.tensor([4000, 2345], device="cuda"))
    slopes, logits = torch.rand(8, device="cuda"), torch.randn(8, device="cuda").requires_grad_()
    changes = scores.sink(logits)
    if kind == "table":
        changes += scores.relative(torch.randn(8, 32, device="cuda").requires_grad_(), scores.t5_buckets())
    elif kind == "key_bias":
        changes += scores.key_bias(torch.randn(1, 8, 4000, device="cuda").requires_grad_())
    elif kind == "bias":
        changes += scores.bias(torch.randn(2, 8, 4000, 4000, device="cuda", dtype=torch.bfloat16).requires_grad_())
    elif kind == "tile_bias":
        shape = 2, 8, len(mask.indices), 128, 128
        changes += scores.tile_bias(torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_(), mask)
    else:
        changes += scores.alibi(slopes.requires_grad_(kind != "capped"))
    if kind == "capped":
        changes += scores.softcap(5.0)
    first = results(q, k, v, mask, dout, dlse, changes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = results(q, k, v, mask, dout, dlse, changes)
    for _ in range(20):
        graph.replay()
        assert all(map(torch.equal, recorded, first))
        assert all(map(torch.equal, results(q, k, v, mask, dout, dlse, changes), first))


def test_changed_scores_of_rows_and_columns_that_are_cut_are_exact():
    layout = torch.zeros(256, 256, dtype=torch.bool)
    layout[:2] = layout[:, :2] = True
    layout |= torch.eye(256, dtype=torch.bool)
    mask = BlockMask.from_layout(layout, block=128).to("cuda")
    q, k, v, _, _ = inputs(1, 4, 32_768, 64)
    for changes in (
        scores.softcap(2.0) + scores.sink(torch.randn(4, device="cuda")),
        scores.alibi(torch.tensor([0.5, 0.1, 0.0, -0.1], device="cuda")),
        scores.relative(torch.randn(4, 32, device="cuda"), scores.t5_buckets(32, 20_000)),
        scores.key_bias(torch.randn(1, 4, 32_768, device="cuda").requires_grad_()),
        scores.bias(torch.randn(1, 1, 32_768, 32_768, device="cuda", dtype=torch.bfloat16)),
    ):

        def layer(q, k, v, changes=changes):
            return attention(q, k, v, mask, scores=changes, return_lse=True, backend="hopper")

        testing.assert_exact(layer, q, k, v, mask, scores=changes, heads=1, blocks=8)


@pytest.mark.parametrize("kind", ["alibi", "table", "key_bias", "bias"])
def test_gradients_of_changes_where_columns_are_cut_are_recorded(kind):
    q, _, _, dout, dlse = inputs(1, 4, 4096, 64)
    k, v = (torch.randn(1, 1, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    mask = BlockMask.dense(4096, block=128).to("cuda")
    planned = backward_pass.planned_backward(plan(mask, heads=4, kv_heads=1), multiprocessors(mask.device))
    assert planned.parts
    if kind == "alibi":
        learned = scores.alibi(torch.rand(4, device="cuda").requires_grad_())
    elif kind == "key_bias":
        learned = scores.key_bias(torch.randn(1, 4, 4096, device="cuda").requires_grad_())
    elif kind == "bias":
        learned = scores.bias(torch.randn(1, 4, 4096, 4096, device="cuda", dtype=torch.bfloat16).requires_grad_())
    else:
        learned = scores.relative(torch.randn(4, 32, device="cuda").requires_grad_(), scores.t5_buckets())
    changes = learned + scores.sink(torch.zeros(4, device="cuda"))
    draws = [torch.randn_like(dout) for _ in range(3)]
    assert_replays_as_called(lambda: results(q, k, v, mask, dout, dlse, changes), dout.copy_, draws)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("causal", [True, False])
def test_tables_with_one_bucket_for_many_tiles_are_exact(dim, causal):
    q, k, v, _, _ = inputs(1, 4, 1900, dim)
    k, v = (x[:, ::2].detach().requires_grad_() for x in (k, v))
    mask = masks.causal(1900, block=128).to("cuda") if causal else None
    for bucket in (partial(wide, near=50), scores.t5_buckets(16, 300)):
        table = torch.randn(4, 16, device="cuda", requires_grad=True)
        changes = scores.relative(table, bucket) + scores.sink(torch.randn(4, device="cuda", requires_grad=True))

        def layer(q, k, v, changes=changes):
            return attention(q, k, v, mask, scores=changes, return_lse=True, backend="hopper")

        testing.assert_exact(layer, q, k, v, mask, scores=changes)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize("causal", [True, False])
def test_biases_of_keys_that_batch_or_heads_share_are_exact(dim, shape, causal):
    q, k, v, _, _ = inputs(2, 4, 1900, dim)
    k, v = (x[:, ::2].detach().requires_grad_() for x in (k, v))
    mask = masks.causal(1900, block=128).to("cuda") if causal else None
    changes = scores.key_bias(torch.randn(*shape, 1900, device="cuda", requires_grad=True)) + scores.sink(
        torch.randn(4, device="cuda", requires_grad=True)
    )

    def layer(q, k, v):
        return attention(q, k, v, mask, scores=changes, return_lse=True, backend="hopper")

    testing.assert_exact(layer, q, k, v, mask, scores=changes)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("block", [64, 128])
def test_biases_of_minus_infinity_are_padding(dim, block):
    q, k, v, dout, _ = inputs(3, 2, 1000, dim)
    stops = torch.tensor([900, 300, 0], device="cuda")
    values = torch.zeros(3, 1, 1000, device="cuda")
    values = values.masked_fill(torch.arange(1000, device="cuda") >= stops[:, None, None], -torch.inf).requires_grad_()
    mask = masks.causal(1000, block=block).to("cuda")
    got = attention(q, k, v, mask, scores=scores.key_bias(values), return_lse=True, backend="hopper")
    got += torch.autograd.grad(got[0], (q, k, v, values), dout)
    padded = mask.with_lengths(q_lengths=torch.full_like(stops, 1000), k_lengths=stops)
    wanted = attention(q, k, v, padded, return_lse=True, backend="hopper")
    wanted += torch.autograd.grad(wanted[0], (q, k, v), dout)
    for x, y in zip(got[:-1], wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)
    assert got[-1].isfinite().all() and not got[-1][values.isneginf()].any()


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_entries_that_are_not_finite_stay_where_they_are(dim):
    q, k, v, dout, _ = inputs(1, 2, 1000, dim)
    mask = masks.causal(1000, block=128).to("cuda")
    table = torch.zeros(2, 600, device="cuda").masked_fill(torch.arange(600, device="cuda") < 100, -torch.inf)
    changes = scores.relative(table, lambda offsets: (offsets + 400).clamp(0, 599))
    got = attention(q, k, v, mask, scores=changes, return_lse=True, backend="hopper")
    got += torch.autograd.grad(got[0], (q, k, v), dout)
    window = masks.local(1000, window=301, causal=True, block=128).to("cuda")
    wanted = attention(q, k, v, window, return_lse=True, backend="hopper")
    wanted += torch.autograd.grad(wanted[0], (q, k, v), dout)
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)


def results(q, k, v, mask, dout, dlse, changes=None):
    """The leaves are new: autograd remembers the stream of a leaf's first use."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    learned = []
    if changes is not None:
        changes = changes.with_tensors([x.detach().requires_grad_(x.requires_grad) for x in changes.tensors()])
        learned = [x for x in changes.tensors() if x.requires_grad]
    out, lse = attention(q, k, v, mask, scores=changes, return_lse=True, backend="hopper")
    return out, lse, *torch.autograd.grad((out, lse), (q, k, v, *learned), (dout, dlse))


def inputs(batch, heads, tokens, dim, dtype=torch.bfloat16):
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, tokens, dim, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    return q, k, v, torch.randn_like(q), torch.randn(batch, heads, tokens, device="cuda")


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (1, 49), (64, 4096), (4096, 64)])
def test_short_sequences_without_a_mask(dim, queries, keys):
    testing.assert_exact(
        lambda q, k, v, return_lse=False: attention(q, k, v, backend="hopper", return_lse=return_lse),
        *inputs(1, 2, queries, dim)[:1], *inputs(1, 2, keys, dim)[1:3],
    )  # fmt: skip


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_the_same_bits_at_every_launch_beside_a_busy_stream(dim):
    q, k, v, dout, dlse = inputs(2, 8, 4000, dim)
    mask = masks.causal(4000, block=128).to("cuda").with_lengths(torch.tensor([4000, 2345], device="cuda"))
    first = results(q, k, v, mask, dout, dlse)
    a, other = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    for _ in range(100):
        with torch.cuda.stream(other):
            a @ a
        assert all(map(torch.equal, results(q, k, v, mask, dout, dlse), first))


SHUFFLED = {
    "dense": lambda n: BlockMask.dense(n, block=128),
    "causal": lambda n: masks.causal(n, block=128),
    "causal in blocks of 64": lambda n: masks.causal(n, block=64),
    "window": lambda n: masks.local(n, window=300, block=128),
    "random": lambda n: masks.random_blocks(n, count=2, block=128),
    "random in blocks of 64": lambda n: masks.random_blocks(n, count=2, block=64),
    "butterfly": lambda n: masks.butterfly(n, block=128),
}


@pytest.mark.parametrize("busy", [False, True], ids=["alone", "beside a busy stream"])
def test_ten_thousand_shuffled_launches_have_the_bits_of_the_first(busy):
    draw, cases = random.Random(0), []
    for dim, tokens, heads in itertools.product(HEAD_DIMS, (200, 1024, 2300), (1, 6)):
        given = inputs(1 + heads % 2, heads, tokens, dim)
        for make in draw.sample(sorted(SHUFFLED), 3):
            cases.append((*given[:3], SHUFFLED[make](tokens).to("cuda"), *given[3:]))
    firsts = [results(*case) for case in cases]
    a, other, others = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream(), torch.zeros((), device="cuda")
    for number in range(5000):
        if busy and number % 4 == 0:
            with torch.cuda.stream(other):
                a @ a
        which = draw.randrange(len(cases))
        for x, y in zip(results(*cases[which]), firsts[which], strict=True):
            others += (x != y).any()
    assert others.item() == 0


def test_launches_of_several_streams_disturb_each_other_in_nothing():
    """Concurrent backwards each need every SM, and share no counters."""
    q, k, v, dout, dlse = inputs(1, 16, 4096, 64)
    mask = masks.local(4096, window=1000, block=128).to("cuda")
    first = results(q, k, v, mask, dout, dlse)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    found = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(results(q, k, v, mask, dout, dlse))
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for got in found for x, y in zip(got, first, strict=True))


def test_a_recorded_launch_gives_the_same_bits_at_every_replay():
    q, k, v, dout, dlse = inputs(1, 4, 2048, 128, torch.float16)
    mask = masks.causal(2048, block=128).to("cuda")
    first = results(q, k, v, mask, dout, dlse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = results(q, k, v, mask, dout, dlse)
    for _ in range(20):
        graph.replay()
        assert all(map(torch.equal, recorded, first))


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_choices_made_at_every_step_have_the_bits_of_masks_made_once(dim, group):
    """Forwards only: backwards of masks made once cut columns."""
    q, k, v, dout, _ = inputs(1, 4, 8192, dim)
    k, v = (x[:, ::group].detach().requires_grad_() for x in (k, v))
    chosen = torch.rand(1, 4 // group, 64, 64, device="cuda")

    def choice():
        return masks.top_k_blocks(chosen, k=8, q_len=8192, block=128, causal=True, local_blocks=1, group=group)

    def step():
        out, lse = attention(q, k, v, choice(), return_lse=True, backend="hopper")
        return out, lse, *torch.autograd.grad(out, (q, k, v), dout)

    draws = [torch.rand(chosen.shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    assert_replays_as_called(step, chosen.copy_, draws)
    once = BlockMask.from_dense(choice().to_dense().cpu(), block=128).to("cuda")
    for got, want in zip(step()[:2], attention(q, k, v, once, return_lse=True, backend="hopper"), strict=True):
        assert torch.equal(got, want)

    def layer(q, k, v):
        return attention(q, k, v, choice(), return_lse=True, backend="hopper")

    testing.assert_exact(layer, q, k, v, choice(), heads=1, blocks=8)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_choices_in_blocks_of_64_have_the_bits_of_masks_made_once(dim):
    q, k, v, dout, _ = inputs(1, 4, 4096, dim)
    chosen = torch.rand(1, 4, 64, 64, device="cuda")

    def choice():
        return masks.top_k_blocks(chosen, k=8, q_len=4096, block=64, causal=True, local_blocks=1)

    def step():
        out, lse = attention(q, k, v, choice(), return_lse=True, backend="hopper")
        return out, lse, *torch.autograd.grad(out, (q, k, v), dout)

    draws = [torch.rand(chosen.shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    assert_replays_as_called(step, chosen.copy_, draws)
    once = BlockMask.from_dense(choice().to_dense().cpu(), block=64).to("cuda")
    out, lse = attention(q, k, v, once, return_lse=True, backend="hopper")
    (dq,) = torch.autograd.grad(out, q, dout)
    for got, want in zip(step()[:3], (out, lse, dq), strict=True):  # columns may be cut, or walked in another order
        assert torch.equal(got, want)
    testing.assert_exact(
        lambda q, k, v: attention(q, k, v, choice(), return_lse=True, backend="hopper"), q, k, v, choice(), heads=2,
        blocks=16,
    )  # fmt: skip
    testing.assert_exact(
        lambda q, k, v: attention(q, k, v, once, return_lse=True, backend="hopper"), q, k, v, once, heads=2, blocks=16
    )


@pytest.mark.parametrize("dims", [(192, 128), (192, 192), (256, 256)])
def test_choices_for_wide_heads_have_a_portable_forward_and_their_backward(dims):
    q, k, v = (torch.randn(1, 4, 2100, dim, device="cuda", dtype=torch.bfloat16) for dim in (dims[0], *dims))
    k, v = k[:, ::2], v[:, ::2]
    chosen = torch.rand(1, 2, 17, 17, device="cuda")

    def choice():
        return masks.top_k_blocks(chosen, k=5, q_len=2100, block=128, causal=True, local_blocks=1, group=2)

    found = explain(q, k, v, choice())
    assert (found.forward.family, found.backward.family) == ("portable", "hopper")

    def layer(q, k, v):
        return attention(q, k, v, choice(), return_lse=True)

    for _ in range(3):  # planned, and prepared for masks of this layout
        testing.assert_exact(layer, q, k, v, choice())
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    results = [torch.autograd.grad(layer(*given)[0].square().sum(), given) for _ in range(2)]
    assert all(map(torch.equal, *results))


def test_long_sequences_of_few_tiles_are_exact():
    q, k, v, _, _ = inputs(1, 2, 200_000, 64)
    mask = masks.local(200_000, window=129, block=128).to("cuda")

    def layer(q, k, v):
        return attention(q, k, v, mask, return_lse=True, backend="hopper")

    testing.assert_exact(layer, q, k, v, mask, heads=1, blocks=8)


def test_tiles_with_very_many_additions_are_exact():
    q, k, v, _, _ = inputs(1, 4, 32_768, 128)
    rows = torch.arange(256)
    layout = ((rows[:, None] - rows).abs() <= 1) | (rows[:, None] < 2) | (rows < 2)
    mask = BlockMask.from_layout(layout, block=128).to("cuda")

    def layer(q, k, v):
        return attention(q, k, v, mask, return_lse=True, backend="hopper")

    testing.assert_exact(layer, q, k, v, mask, heads=1, blocks=8)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("planned_on", ["cpu", "cuda"])
def test_a_mask_without_a_live_tile_has_gradients_of_zero(dim, planned_on):
    q, k, v, dout, dlse = inputs(2, 8, 1000, dim)
    layout = torch.zeros(8, 8, dtype=torch.bool)
    mask = BlockMask.from_layout(layout.to(planned_on), q_len=1000, k_len=1000, block=128).to("cuda")
    for _ in range(3):  # the first launch goes through Triton, later ones straight to the driver
        out, lse, *gradients = results(q, k, v, mask, dout, dlse)
        assert lse.isneginf().all() and not any(x.any() for x in (out, *gradients))


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("tiles", [1, 3])
def test_items_of_an_odd_number_of_steps_are_exact(dim, tiles):
    """The senders take turns over the steps of all items."""
    mask = masks.documents([128 * tiles] * 24, block=128).to("cuda")
    q, k, v, _, _ = inputs(2, 8, 128 * tiles * 24, dim)

    def layer(q, k, v):
        return attention(q, k, v, mask, return_lse=True, backend="hopper")

    testing.assert_exact(layer, q, k, v, mask, heads=1, blocks=8)


def grouped(tokens, heads, kv_heads, dim, dtype=torch.bfloat16):
    q, _, _, dout, dlse = inputs(1, heads, tokens, dim, dtype)
    k, v = (torch.randn(1, kv_heads, tokens, dim, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
    mask = masks.bigbird(tokens, block=128).to("cuda")
    made = backward_pass.planned_backward(plan(mask, 1, heads, kv_heads), multiprocessors(q.device))
    assert made.parts > len(made.merged) > 0
    return q, k, v, mask, dout, dlse


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", HALF, ids=["fp16", "bf16"])
def test_columns_that_are_cut_are_exact(dim, dtype):
    q, k, v, mask, _, _ = grouped(16_384, 32, 8, dim, dtype)

    def layer(q, k, v):
        return attention(q, k, v, mask, return_lse=True, backend="hopper")

    testing.assert_exact(layer, q, k, v, mask, heads=1, blocks=8)


@pytest.mark.parametrize("dim", [64, 128])
def test_columns_that_are_cut_have_the_same_bits_at_every_launch_and_replay(dim):
    given = grouped(8192, 32, 8, dim)
    first = results(*given)
    for _ in range(30):
        assert all(map(torch.equal, results(*given), first))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = results(*given)
    for _ in range(10):
        graph.replay()
        assert all(map(torch.equal, recorded, first))
