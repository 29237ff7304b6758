from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, attention, clear_caches, masks
from sparseflash.backends.problem import Problem as Planned
from sparseflash.backends.triton.schedule.plan import plan_of
from sparseflash.masks import block_index, fused
from sparseflash.masks.tiling.chosen import row_frame
from tests.compared.algebra import peak_of
from tests.compared.exactness import check
from tests.drawn.masks import SEEDS, blocks, lengths
from tests.drawn.problems import Problem, problems
from tests.watched.waiting import NoWaiting, assert_replays_as_called

WAYS = ("operations", "kernels")


def by(way):
    return mock.patch.object(fused, "_DEVICES", ["cpu"] if way == "kernels" else [])


def generator(seed):
    return torch.Generator().manual_seed(seed)


def dense_of_lists(index, counts, q_len, k_len, block, causal):
    """The docstring's rule, a list at a time: bool `[B, H, Nq, Nk]`."""
    batch, heads, rows, _ = index.shape
    live = torch.zeros(batch, heads, q_len, k_len, dtype=torch.bool)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (batch, heads, rows))).tolist():
        listed = index[b, h, i].tolist()
        for j in listed if counts is None else listed[: counts[b, h, i]]:
            if j >= 0:
                live[b, h, i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]] = True
    if causal:
        live &= torch.arange(k_len) <= torch.arange(q_len)[:, None] + (k_len - q_len)
    return live


@st.composite
def lists(draw):
    block = draw(blocks((16, 32, 64)))
    q_len = draw(lengths(150, block[0]))
    k_len = draw(st.just(q_len) | lengths(150, block[1]))
    shape = (*draw(st.sampled_from([(1, 1), (2, 3), (1, 4)])), -(-q_len // block[0]), draw(st.integers(1, 6)))
    seed = draw(SEEDS)
    index = torch.randint(-1, -(-k_len // block[1]) + 2, shape, generator=generator(seed))
    counts = torch.randint(0, shape[-1] + 2, shape[:-1], generator=generator(seed + 1))
    dtype = draw(st.sampled_from([torch.int32, torch.int64, torch.int16]))
    counts = draw(st.sampled_from([None, counts.to(dtype)]))
    sizes = {"block": block, "q_len": q_len, "k_len": k_len, "causal": draw(st.booleans())}
    return index.to(dtype), counts, sizes


@given(lists(), st.sampled_from(WAYS))
def test_the_listed_blocks_are_live(drawn, way):
    index, counts, sizes = drawn
    with by(way):
        mask = BlockMask.from_block_index(index, counts, **sizes)
    assert mask.dynamic
    mask.validate()
    want = dense_of_lists(index, counts, **sizes)
    assert torch.equal(mask.to_dense(), want)
    assert mask == BlockMask.from_dense(want, block=sizes["block"])


@given(lists())
def test_kernels_and_operations_make_the_same_arrays(drawn):
    index, counts, sizes = drawn
    with by("operations"):
        want = BlockMask.from_block_index(index, counts, **sizes)
    with by("kernels"), mock.patch.object(block_index, "_tiles", side_effect=AssertionError("operations")):
        got = BlockMask.from_block_index(index, counts, **sizes)
    for name in ("indptr", "indices", "tile", "bits", "pattern"):
        a, b = getattr(got, name), getattr(want, name)
        assert a.dtype == b.dtype and torch.equal(a, b), name


@pytest.mark.parametrize("way", WAYS)
def test_the_capacity_is_that_of_the_lists(way):
    index = torch.zeros(2, 3, 8, 3, dtype=torch.int32)
    with by(way):
        assert len(BlockMask.from_block_index(index, block=16, q_len=128).indices) == 6 * 8 * 3
        causal = BlockMask.from_block_index(index, block=16, q_len=128, causal=True)
        assert len(causal.indices) == 6 * (1 + 2 + 3 * 6)
        wide = BlockMask.from_block_index(index.expand(2, 3, 8, 3).repeat(1, 1, 1, 9), block=16, q_len=128)
        assert len(wide.indices) == 6 * 8 * 8  # never more than the number of blocks


@pytest.mark.parametrize("causal", [False, True])
def test_a_long_sequence_takes_memory_by_its_lists_from_the_first_call(causal):
    rows = 524_288 // 64
    index = torch.arange(rows, dtype=torch.int32)[:, None] - torch.arange(4, dtype=torch.int32)

    def made():
        clear_caches()
        return BlockMask.from_block_index(index, block=64, q_len=524_280, causal=causal)

    mask, seconds, megabytes = peak_of(made)
    assert seconds < 1 and megabytes < 10
    frame = row_frame(524_280, 524_280, (64, 64), causal, index.device)
    assert sum(x.nbytes for x in frame if isinstance(x, torch.Tensor)) < mask.nbytes


@dataclass(frozen=True)
class Listed:
    problem: Problem
    seed: int

    def mask(self):
        of, block = self.problem, (16, 32)
        rows, cols = -(-of.q_len // block[0]), -(-of.k_len // block[1])
        index = torch.randint(-1, cols, (of.batch, of.kv_heads, rows, 2), generator=generator(self.seed))
        return BlockMask.from_block_index(
            index, block=block, q_len=of.q_len, k_len=of.k_len, causal=True, group=of.heads // of.kv_heads
        )


SMALL = {"most_tokens": 70, "most_heads": 2, "head_dims": (16,), "value_dims": (16,), "blocks": (16, 32)}


@pytest.mark.parametrize("backend", ["blockwise", "triton"])
@given(problems(**SMALL, dtypes=(torch.float32, torch.float16)), SEEDS)
def test_attention_over_listed_blocks_is_exact_with_its_gradients(backend, problem, seed):
    check(replace(problem, recipe=Listed(problem, seed)), backend)


def test_choosing_and_planning_wait_for_nothing():
    index = torch.randint(0, 4, (1, 2, 4, 2), generator=generator(0))
    counts = torch.tensor([1, 2, 0, 2]).expand(1, 2, 4)
    sizes = {"block": 16, "q_len": 64, "causal": True, "group": 2}
    BlockMask.from_block_index(index, counts, **sizes)
    with NoWaiting() as seen:
        mask = BlockMask.from_block_index(index, counts, **sizes)
        assert seen.started <= 31, "each takes the host about 5 us"
        plan = plan_of(Planned.of(mask, scale=1.0), (1, 4), 2, (64, 64))
        plan.worklist(0, 16), plan.worklist(1, 16)


def test_sizes_are_known_without_any_value():
    mask = BlockMask.from_block_index(torch.empty(1, 2, 4, 3, dtype=torch.int32, device="meta"), block=16, q_len=64)
    assert mask.device.type == "meta" and len(mask.indices) == 24


def test_torch_compile_makes_one_graph_of_the_choice_and_attention():
    def step(q, k, v, index):
        return attention(q, k, v, BlockMask.from_block_index(index, block=16, q_len=64, causal=True)).sin()

    torch.compiler.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for seed in (0, 1):
        q, k, v = torch.randn(3, 1, 2, 64, 16, generator=generator(seed)).requires_grad_()
        index = torch.randint(0, 4, (1, 2, 4, 2), generator=generator(seed))
        torch.testing.assert_close(compiled(q, k, v, index), step(q, k, v, index), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------- one list a query


@pytest.mark.parametrize(("kv_heads", "tokens"), [(2, 64), (1, 90), (3, 33)])
def test_lists_of_nsa_and_of_tokens_are_chosen_keys(kv_heads, tokens):
    span, sizes = 16, {"k_len": tokens, "block": (16, 32), "causal": True, "group": 2}
    begun = torch.arange(tokens)[:, None] // span + 1
    index = (torch.rand(kv_heads, tokens, 3, generator=generator(tokens)) * (begun + 1)).int() - 1
    live = torch.zeros(kv_heads, tokens, tokens, dtype=torch.bool)
    for h, q, n in (index >= 0).nonzero().tolist():
        start = int(index[h, q, n]) * span
        live[h, q, start : min(start + span, q + 1)] = True
    mask = masks.selected_keys(index, span=span, **sizes)
    assert torch.equal(mask.to_dense()[0], live.repeat_interleave(2, 0))
    tokenwise = index.transpose(0, 1).contiguous()
    assert masks.selected_keys(tokenwise.transpose(0, 1), span=span, **sizes) == mask


# ---------------------------------------------------------------------- what is refused

INDEX = torch.zeros(1, 2, 4, 3, dtype=torch.int32)
COUNTS = INDEX[..., 0]


@pytest.mark.parametrize(
    ("index", "counts", "changes", "error", "message"),
    [
        (INDEX.float(), None, {}, TypeError, r"index must have an integer dtype; got torch\.float32"),
        (INDEX[0, 0, 0], None, {}, ValueError, r"index must have shape \[Mq, K\], .*; got \[3\]"),
        (INDEX, None, {"q_len": 65}, ValueError, r"index must have 5 rows, one for each block of 16 of 65 q.*; got 4"),
        (INDEX, [1, 2], {}, TypeError, r"counts must be an integer tensor; got list"),
        (INDEX, torch.zeros(1, 2, 4), {}, TypeError, r"counts must be an integer tensor; got torch\.float32"),
        (INDEX, COUNTS.bool(), {}, TypeError, r"counts must be an integer tensor; got torch\.bool"),
        (
            INDEX,
            INDEX[..., :2, 0],
            {},
            ValueError,
            r"counts must have .* each row of index, \[1, 2, 4\]; got \[1, 2, 2\]",
        ),
        (INDEX, COUNTS.to("meta"), {}, ValueError, r"counts must be on index's device cpu; got meta"),
        (INDEX, None, {"group": 0}, ValueError, r"group must be at least 1 query head; got 0"),
        (INDEX, None, {"block": 17}, ValueError, r"block must be one of"),
        (INDEX, None, {"causal": 1}, TypeError, r"causal must be True or False; got 1"),
    ],
)
def test_what_is_refused_and_why(index, counts, changes, error, message):
    with pytest.raises(error, match=message):
        BlockMask.from_block_index(index, counts, **({"q_len": 64, "block": 16} | changes))


# ---------------------------------------------------------------------- on a GPU


def gpu_problem(tokens, heads, choices, block=64):
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, tokens, 128, generator=g, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    )
    index = torch.randint(0, tokens // block, (1, heads, tokens // block, choices), generator=g, device="cuda")
    return q, k, v, index.int()


@pytest.mark.gpu
def test_the_gpu_makes_the_same_mask():
    for choices in (3, 100, 200):
        index = torch.randint(-1, 70, (2, 3, 40, choices), generator=generator(choices))
        arguments = {"block": 32, "q_len": 1270, "k_len": 2200, "causal": True}
        assert BlockMask.from_block_index(index.cuda(), **arguments) == BlockMask.from_block_index(index, **arguments)


@pytest.mark.gpu
def test_a_graph_of_choice_and_attention_is_replayed_with_other_choices():
    q, k, v, index = gpu_problem(2048, 4, 6)

    def step():
        mask = BlockMask.from_block_index(index, block=64, q_len=2048, causal=True)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]  # autograd keeps the stream of a leaf's first use
        out = attention(*leaves, mask)
        return out, *torch.autograd.grad(out.float().square().sum(), leaves)

    chosen = (torch.randint(-1, 32, index.shape, generator=generator(seed)) for seed in range(3))
    assert_replays_as_called(step, index.copy_, chosen)
