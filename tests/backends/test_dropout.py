import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from sparseflash import BlockMask, attention, dropout, masks, scores
from sparseflash.attention import attend
from sparseflash.backends.problem import Problem
from tests.backends.triton.plans import WAYS, calls_of, chunks_of, tilings_taken_by

BACKENDS = ["blockwise", "triton", "reference"]


def tensors(batch=1, heads=2, tokens=40, dim=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, heads, tokens, dim, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


# Random123's tests/kat_vectors.
@pytest.mark.parametrize(
    ("rounds", "word", "want"),
    [
        (7, 0x00000000, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        (7, 0xFFFFFFFF, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
        (10, 0x00000000, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (10, 0xFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ],
)
def test_philox_gives_the_known_answers(rounds, word, want):
    counter = [torch.tensor([word])] * 4
    seed = torch.tensor([0 if word == 0 else -1])
    assert [x.item() for x in dropout.philox(seed, counter, rounds)] == want


@pytest.mark.parametrize(
    ("rounds", "want"),
    [
        (7, [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A]),
        (10, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ],
)
def test_philox_gives_the_known_answers_of_words_that_all_differ(rounds, want):
    """The digits of pi: a swap of words, or of the seed's halves, is noticed."""
    counter = [torch.tensor([word]) for word in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    seed = torch.tensor([(0x299F31D0 << 32) + 0xA4093822])
    assert [x.item() for x in dropout.philox(seed, counter, rounds)] == want


@given(
    seed=st.integers(-(2**63), 2**63 - 1), p=st.floats(0.01, 0.99), at=st.integers(0, 2**31 - 300),
    row=st.integers(0, 2**31 - 1),
)  # fmt: skip
def test_the_share_that_is_dropped_is_p_wherever_it_is_looked_for(seed, p, at, row):
    drawn = dropout.Dropout(torch.tensor([seed]), dropout.threshold(p))
    query = torch.arange(at, at + 256).view(-1, 1)
    kept = dropout.kept(drawn, torch.tensor(row), query, torch.arange(at // 16, at // 16 + 16))
    share = drawn.dropped / 256
    five_deviations = 5 * (share * (1 - share) / kept.numel()) ** 0.5
    assert kept.shape == (256, 256)
    assert abs((~kept).double().mean().item() - share) < five_deviations


def test_seeds_heads_queries_and_keys_are_dropped_independently_of_each_other():
    keep = torch.stack([dropout.keep_mask(seed, 0.5, 2, 2, 64, 64) for seed in (0, 1, 2**32)]).flatten(0, 2)
    rows = keep.flatten(0, 1).double() - 0.5
    correlation = (rows @ rows.T).fill_diagonal_(0.0) * 4 / 64
    assert correlation.abs().max() < 6 / 64**0.5
    correlation = (rows.T @ rows).fill_diagonal_(0.0) * 4 / len(rows)
    assert correlation.abs().max() < 5 / len(rows) ** 0.5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", [7, 0x123456789ABCDEF1, -(2**63) + 2**31])
def test_what_is_kept_is_what_keep_mask_says(backend, seed):
    q, k, _ = tensors(batch=2, tokens=40)
    v = torch.eye(40).expand(2, 2, 40, 40).contiguous()
    mask = masks.local(40, window=25, block=16)
    weights = attention(q, k, v, mask, dropout_p=0.5, seed=seed, backend=backend)
    plain = attention(q, k, v, mask, backend=backend)
    keep = dropout.keep_mask(seed, 0.5, 2, 2, 40, 40)
    torch.testing.assert_close(weights, torch.where(keep, 2 * plain, 0.0))


def part_of_a_problem(seed, batch=2, heads=2, q_len=37, k_len=56):
    generator = torch.Generator().manual_seed(2)
    chosen = torch.randperm(5, generator=generator)[:heads]
    queries = torch.randperm(70, generator=generator)[:q_len]
    groups = torch.randperm(8, generator=generator)[: -(-k_len // 16)]
    rows = torch.arange(batch)[:, None] * 5 + chosen
    keys = (groups[:, None] * 16 + torch.arange(16)).reshape(-1)[:k_len]
    keep = dropout.keep_mask(seed, 0.5, batch, 5, 70, 128)[:, chosen][:, :, queries][..., keys]
    return dropout.Dropout(torch.tensor([seed]), 128, rows.int(), queries.int(), groups.int()), keep


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("given", "changes"),
    [(("rows",), None), (("queries", "groups"), None), (("rows", "queries", "groups"), scores.softcap(3.0))],
    ids=["heads", "tokens", "both, with changed scores"],
)
def test_a_part_of_a_problem_drops_what_the_whole_drops(backend, given, changes):
    drawn, keep = part_of_a_problem(9)
    everything = set(drawn.coordinates)
    if set(given) != everything:
        drawn = drawn._replace(**dict.fromkeys(everything - set(given)))
        keep = dropout.kept_everywhere(drawn, *keep.shape)
    assert tuple(drawn.coordinates) == given
    q, k, v = tensors(2, 2, 37)[0], tensors(2, 2, 56)[1], torch.eye(56).expand(2, 2, 56, 56).contiguous()
    mask = masks.local(37, 56, window=30, block=16)
    weights, lse = attend(q, k, v.requires_grad_(), mask, None, drawn, changes, backend)
    plain, plain_lse = attend(q, k, v, mask, None, None, changes, backend)
    assert torch.equal(lse, plain_lse)
    torch.testing.assert_close(weights, torch.where(keep, 2 * plain, 0.0))
    (dv,) = torch.autograd.grad(weights.sum(), v)  # each number of a row: the sum of a key's weights
    torch.testing.assert_close(dv, weights.detach().sum(2)[..., None].expand_as(dv))


def test_a_part_of_a_problem_has_the_gradients_that_the_definition_gives_it():
    drawn, _ = part_of_a_problem(4)
    mask = masks.local(37, 56, window=30, block=16)
    inputs = [x.detach().double().requires_grad_() for x in (*tensors(2, 2, 37)[:1], *tensors(2, 2, 56)[:2])]
    out, lse = attend(*inputs, mask, None, drawn, None, "reference")
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.autograd.grad((out * dout).sum() + lse.square().sum(), inputs)
    for backend, dtype, chunks in (
        ("blockwise", torch.float64, None), ("triton", torch.float32, None), ("triton", torch.float32, 16)
    ):  # fmt: skip
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        with chunks_of(chunks):
            out, lse = attend(*leaves, mask, None, drawn, None, backend)
            found = torch.autograd.grad((out * dout).sum() + lse.square().sum(), leaves)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_gathered_and_united_tiles_of_a_part_drop_what_the_whole_drops(way):
    drawn, keep = part_of_a_problem(3)
    live = torch.rand(37, 56, generator=torch.Generator().manual_seed(5)) < 0.5
    mask = BlockMask.from_dense(live, block=16)
    q, k, v = tensors(2, 2, 37)[0], tensors(2, 2, 56)[1], torch.eye(56).expand(2, 2, 56, 56).contiguous()
    with tilings_taken_by(way):
        weights, _ = attend(q, k, v.requires_grad_(), mask, None, drawn, None, "triton")
        (dv,) = torch.autograd.grad(weights.sum(), v)
    plain, _ = attend(q, k, v, mask, None, None, None, "reference")
    torch.testing.assert_close(weights, torch.where(keep, 2 * plain, 0.0))
    torch.testing.assert_close(dv, weights.detach().sum(2)[..., None].expand_as(dv))


@pytest.mark.parametrize("backend", BACKENDS)
def test_lse_is_that_without_dropout_and_no_dropout_is_no_change(backend):
    q, k, v = tensors()
    out, lse = attention(q, k, v, return_lse=True, backend=backend)
    assert torch.equal(attention(q, k, v, return_lse=True, dropout_p=0.4, seed=1, backend=backend)[1], lse)
    assert torch.equal(attention(q, k, v, dropout_p=0.0, seed=1, backend=backend), out)


def test_gradients_are_finite_where_out_is_too_large_for_fp16():
    q, k, _ = tensors(dtype=torch.float16)
    v = torch.full_like(k, 60_000.0)
    out = attention(q, k, v, dropout_p=0.5, seed=0, backend="blockwise")
    assert out.isinf().any()
    for gradient in torch.autograd.grad(out, (q, k), torch.full_like(out, 1e-5)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_seed_decides(backend):
    q, k, v = tensors()

    def run(seed):
        return attention(q, k, v, dropout_p=0.4, seed=seed, backend=backend)

    assert torch.equal(run(3), run(3))
    for shape in ((), (1,), (1, 1), (1, 1, 1, 1, 1)):
        assert torch.equal(run(3), run(torch.full(shape, 3)))
    assert not torch.equal(run(3), run(4))
    assert not torch.equal(run(3), run(3 + 2**40))
    torch.manual_seed(0)
    first, second = run(None), run(None)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(run(None), first)


@pytest.mark.parametrize(
    ("p", "dropped"), [(0.0, 0), (1e-9, 1), (0.1, 26), (0.5, 128), (0.999999, 255)]
)  # fmt: skip
def test_p_goes_in_steps_of_one_in_256_and_never_becomes_none_or_all(p, dropped):
    assert dropout.threshold(p) == dropped


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan")])
def test_a_probability_out_of_range_is_an_error(p):
    q, k, v = tensors()
    with pytest.raises(ValueError, match="dropout_p"):
        attention(q, k, v, dropout_p=p)


def test_a_seed_may_be_of_numpy():
    q, k, v = tensors()
    out = attention(q, k, v, dropout_p=0.5, seed=7)
    assert torch.equal(attention(q, k, v, dropout_p=0.5, seed=np.int64(7)), out)


@pytest.mark.parametrize(
    ("seed", "error"),
    [(1.5, TypeError), (True, TypeError), (2**63, ValueError), (torch.zeros(2, dtype=torch.int64), ValueError),
     (torch.zeros(1), ValueError), (torch.zeros(1, dtype=torch.int64, device="meta"), ValueError)],
    ids=["float", "bool", "too large", "two", "a float tensor", "another device"],
)  # fmt: skip
def test_a_seed_that_is_none_is_an_error(seed, error):
    q, k, v = tensors()
    with pytest.raises(error, match="seed must"):
        attention(q, k, v, dropout_p=0.5, seed=seed)


@pytest.mark.parametrize("backend", ["blockwise", "triton"])
def test_compiles_into_one_graph_for_every_seed(backend):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def step(q, k, v, seed):
        return attention(q, k, v, dropout_p=0.3, seed=seed, backend=backend)

    torch.compiler.reset()
    compiled = torch.compile(step, backend=count, fullgraph=True)
    q, k, v = (x.detach() for x in tensors())
    for seed in (torch.tensor([1]), torch.tensor([2])):
        assert torch.equal(compiled(q, k, v, seed), step(q, k, v, seed))
    assert len(graphs) == 1


@pytest.mark.parametrize("backend", ["blockwise", "triton"])
def test_a_recomputed_forward_drops_what_the_first_one_dropped(backend):
    def loss(q, k, v):
        return attention(q, k, v, dropout_p=0.3, backend=backend).square().sum()

    inputs = tensors()
    torch.manual_seed(5)
    want = torch.autograd.grad(loss(*inputs), inputs)
    torch.manual_seed(5)
    got = torch.autograd.grad(checkpoint(loss, *inputs, use_reentrant=False), inputs)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["blockwise", "triton"])
def test_opcheck_passes(backend):
    import sparseflash.backends.triton.api  # noqa: F401 - registers the operators

    operator = getattr(torch.ops.sparseflash, backend).default
    few = (x.detach()[:, :, :20].requires_grad_() for x in tensors())
    few = tuple(few)
    torch.library.opcheck(operator, (*few, *(None,) * 6, 128, 128, 0.25, torch.tensor([3]), 64))
    drawn, _ = part_of_a_problem(3, batch=1, heads=2, q_len=20, k_len=20)
    torch.library.opcheck(operator, (*few, *Problem.of(None, scale=0.25, dropout=drawn)))


@pytest.mark.parametrize("backend", ["blockwise", "triton"])
def test_a_compiled_step_draws_one_seed_for_forward_and_backward(backend):
    def step(q, k, v):
        return attention(q, k, v, dropout_p=0.5, backend=backend)

    torch.compiler.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    q, k, _ = tensors()
    v = torch.eye(40).expand(1, 2, 40, 40).contiguous().requires_grad_()
    weights = compiled(q, k, v)
    weights.sum().backward()
    torch.testing.assert_close(v.grad, weights.detach().sum(2)[..., None].expand_as(v))


def test_a_seed_may_lie_at_any_address_and_needs_no_kernel_of_its_own():
    q, k, v = (x.detach() for x in tensors())
    mask = masks.local(40, window=9, block=16)
    for seed in torch.arange(4).split(1):
        out = attention(q, k, v, mask, dropout_p=0.3, seed=seed, backend="triton")
        assert torch.equal(out, attention(q, k, v, mask, dropout_p=0.3, seed=seed.clone(), backend="triton"))
    assert len(calls_of(mask)) == 1


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("given", [("rows",), ("queries", "groups")], ids=["heads", "tokens"])
@pytest.mark.parametrize("way", [None, *WAYS])
def test_a_part_of_a_problem_drops_what_the_whole_drops_on_the_gpu(way, given, dtype):
    drawn, keep = part_of_a_problem(6, q_len=70, k_len=119)
    drawn = drawn._replace(**dict.fromkeys(set(drawn.coordinates) - set(given)))
    keep = dropout.kept_everywhere(drawn, *keep.shape)
    drawn = dropout.Dropout(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in drawn))
    live = torch.rand(70, 119, generator=torch.Generator().manual_seed(5)) < 0.5
    mask = BlockMask.from_dense(live, block=16).to("cuda")
    q, k = (x.detach().to("cuda", dtype) for x in (tensors(2, 2, 70, 64)[0], tensors(2, 2, 119, 64)[1]))
    v = torch.eye(119, dtype=dtype, device="cuda").expand(2, 2, 119, 119).contiguous().requires_grad_()
    with tilings_taken_by(way):
        weights, _ = attend(q, k, v, mask, None, drawn, None, "triton")
        (dv,) = torch.autograd.grad(weights.sum(), v)
    assert torch.equal((weights != 0).cpu(), keep & live)
    torch.testing.assert_close(
        dv.float(), weights.detach().float().sum(2)[..., None].expand_as(dv), rtol=2e-2, atol=2e-2
    )
