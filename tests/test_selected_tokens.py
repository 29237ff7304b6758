import itertools
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash import BlockMask, testing
from sparseflash.backends import reference
from sparseflash.backends.triton.selected import api, gradients, token_tiles
from sparseflash.backends.triton.selected.sizes import sizes_of
from sparseflash.backends.triton.selected.tiles import MOST_DIM, pieces, shape_of, shares_values
from sparseflash.selected_tokens import token_attention, token_scores
from tests.drawn.counts import examples_times
from tests.drawn.masks import SEEDS
from tests.watched.waiting import assert_replays_as_called

HEADS = st.sampled_from([(1, 1, 1), (2, 2, 3), (1, 2, 16), (1, 1, 17)])
DTYPES = st.sampled_from([torch.float32, torch.float16])
few = examples_times(1 / 2)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def live_of(index, group, k_len, causal):
    """The docstring's rule, an entry at a time: bool `[B, Hq, Nq, Nk]`."""
    batch, kv_heads, q_len, _ = index.shape
    live = torch.zeros(batch, kv_heads, q_len, k_len, dtype=torch.bool)
    for b, h, q, n in (index >= 0).nonzero().tolist():
        token = int(index[b, h, q, n])
        if token < k_len and (not causal or token <= q + k_len - q_len):
            live[b, h, q, token] = True
    return live.repeat_interleave(group, 1)


def drawn(heads, q_len, k_len, dims, choices, dtype, seed):
    (batch, kv_heads, group), g = heads, generator(seed)
    index = torch.randint(-1, k_len + 2, (batch, kv_heads, q_len, choices), generator=g)  # with repetitions
    shapes = [(batch, kv_heads * group, q_len, dims[0]), *[(batch, kv_heads, k_len, dim) for dim in dims]]
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes], index


@pytest.mark.parametrize("backend", ["reference", "triton"])
@few
@given(
    HEADS, st.integers(1, 9), st.integers(1, 70), st.sampled_from([(16, 16), (24, 40), (48, 16), (8, 5)]),
    st.integers(0, 20), st.booleans(), DTYPES, SEEDS,
)  # fmt: skip
@example((1, 1, 16), 3, 70, (16, 16), 70, False, torch.float32, 0)
@example((1, 1, 2), 3, 1, (16, 16), 5, False, torch.float16, 1)
@example((1, 1, 2), 8, 3, (16, 16), 5, True, torch.float32, 2)  # queries before all keys
def test_attention_to_chosen_tokens_is_exact_with_its_gradients(
    backend, heads, q_len, k_len, dims, choices, causal, dtype, seed
):
    (q, k, v), index = drawn(heads, q_len, k_len, dims, choices, dtype, seed)
    mask = BlockMask.from_dense(live_of(index, heads[2], k_len, causal), block=16)

    def chosen(q, k, v):
        return token_attention(q, k, v, index, causal=causal, return_lse=True, backend=backend)

    testing.assert_exact(chosen, q, k, v, mask)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@few
@given(HEADS, st.integers(1, 6), st.integers(1, 40), st.sampled_from([(48, 32), (32, 32), (40, 24)]), DTYPES, SEEDS)
def test_values_may_be_the_first_columns_of_keys(backend, heads, q_len, k_len, dims, dtype, seed):
    (q, k, _), index = drawn(heads, q_len, k_len, dims, 12, dtype, seed)
    live = live_of(index, heads[2], k_len, True)
    dout = torch.randn(*q.shape[:3], dims[1], generator=generator(seed)).to(dtype)

    def results(function, dtype):
        given = [x.to(dtype).requires_grad_() for x in (q, k)]
        out, lse = function(*given)
        gradients = torch.autograd.grad(out, given, dout.to(dtype))
        return dict(zip(("out", "lse", "dq", "dk"), (out.detach(), lse.detach(), *gradients), strict=True))

    def plainly(q, k):
        return reference.attention_of_live(q, k, k[..., : dims[1]], live, q.shape[-1] ** -0.5)

    got = results(
        lambda q, k: token_attention(q, k, None, index, v_dim=dims[1], return_lse=True, backend=backend), dtype
    )
    truth, plain = results(plainly, torch.float64), results(plainly, dtype)
    for found in (got, truth, plain):
        found["lse"] = found["lse"].masked_fill(found["lse"] == -torch.inf, 0.0)
    # With one key dq is the difference of equal numbers, and plain results may be exact by luck.
    compared = testing.compare_results(got, truth, plain, magnitudes=dict.fromkeys(got, 1.0))
    assert compared.exact, str(compared)


def gradients_of(tensors, index, **more):
    given = [x.detach().requires_grad_() for x in tensors]
    out, lse = token_attention(*given, index, return_lse=True, backend="triton", **more)
    upstream = torch.randn(out.shape, generator=generator(0)).to(out.dtype)
    return out, lse, *torch.autograd.grad(out, given, upstream)


@few
@given(HEADS, st.integers(1, 4), st.integers(1, 20), st.integers(1, 8), DTYPES, SEEDS)
def test_equal_inputs_have_equal_bits_in_whatever_order_lists_are(heads, q_len, k_len, choices, dtype, seed):
    tensors, index = drawn(heads, q_len, k_len, (16, 16), choices, dtype, seed)
    first = gradients_of(tensors, index)
    shuffled = index[..., torch.randperm(choices, generator=generator(seed))]
    for other in (index, shuffled.int(), index.sort(-1).values):
        assert all(map(torch.equal, first, gradients_of(tensors, other)))
    distinct = torch.rand(*index.shape[:3], k_len, generator=generator(seed)).argsort(-1)[..., :choices]
    first = gradients_of(tensors, distinct)  # what is in order is not sorted again
    assert all(map(torch.equal, first, gradients_of(tensors, distinct.sort(-1).values)))


@few
@given(HEADS, st.integers(1, 40), st.integers(1, 40), st.integers(1, 6), st.integers(1, 40), SEEDS)
@example((1, 1, 1), 40, 5, 3, 40, 0)  # two words of queries
def test_the_places_of_choices_are_sorted_by_token_then_query(heads, q_len, k_len, choices, queries, seed):
    batch, kv_heads, _ = heads
    (q, k, v), index = drawn((batch, kv_heads, 1), q_len, k_len, (16, 16), choices, torch.float32, seed)
    _, _, chosen, _ = api.forward(q, k, v, index, 16, False, 1.0)
    live = live_of(index, 1, k_len, False).flatten(0, 2)
    of = sizes_of(q, k, v, 16, choices, 1.0, backward=True)
    chunks = gradients.chunks_of(of, choices * (4 * 32 + 2 * 4 * heads[2]), queries)
    covered = 0
    for first, pairs, in_chunk in chunks:
        assert first == covered
        covered += pairs * in_chunk
        rows = live[first:covered].view(pairs, in_chunk, k_len)
        counts, ends, places = gradients.places_of(chosen, of, first, pairs, in_chunk)
        assert torch.equal(counts, rows.sum(1).flatten().int())
        assert torch.equal(ends, counts.cumsum(0))
        wanted = {(p, t, n): place for place, (p, t, n) in enumerate(rows.transpose(1, 2).nonzero().tolist())}
        found = {}
        for row, place in itertools.product(range(pairs * in_chunk), range(choices)):
            token = int(chosen.lists.view(-1, choices)[first + row, place])
            if token < k_len:
                found[row // in_chunk, token, row % in_chunk] = int(places[row, place])
            elif place < chosen.counts.view(-1)[first + row]:
                assert places[row, place] == -1
        assert found == wanted
    assert covered == len(live)


@pytest.mark.parametrize(
    ("scratch", "queries", "dtype"),
    [
        (1, 1024, torch.float32), (1 << 14, 3, torch.float32), (2 << 30, 4, torch.float32),
        (1, 1024, torch.float16), (64, 1024, torch.float16),
    ],
)  # fmt: skip
def test_chunks_of_queries_add_up(scratch, queries, dtype):
    (q, k, v), index = drawn((1, 2, 2), 7, 70, (16, 16), 9, dtype, 0)
    mask = BlockMask.from_dense(live_of(index, 2, 70, True), block=16)
    by_tiles = dtype == torch.float16
    with mock.patch.object(gradients, "_SCRATCH", scratch), mock.patch.object(gradients, "_MOST_QUERIES", queries):
        of = sizes_of(q, k, v, 16, 9, 1.0, backward=True)
        of_query = 70 // 8 + 4 * 2 if by_tiles else 9 * (4 * 32 + 2 * 4 * 2)
        assert len(gradients.chunks_of(of, of_query, queries)) > 2  # of the two pairs
        testing.assert_exact(
            lambda q, k, v: token_attention(q, k, v, index, return_lse=True, backend="triton"), q, k, v, mask
        )


@few
@given(
    st.sampled_from([(1, 1, 1), (2, 2, 3), (1, 2, 12), (1, 1, 33)]), st.integers(1, 20), st.integers(1, 140),
    st.sampled_from([(16, 16), (24, 40), (8, 5)]), st.integers(1, 4), st.sampled_from([1, 4]), st.booleans(),
    st.sampled_from([0, 1000]), SEEDS,
)  # fmt: skip
@example((1, 1, 12), 40, 140, (16, 16), 6, 4, True, 1000, 0)
def test_keys_gather_queries_by_tiles_or_queries_write_rows(
    heads, q_len, k_len, dims, choices, span, causal, worth, seed
):
    (q, k, v), index = drawn(heads, q_len, k_len, dims, choices, torch.float16, seed)
    index = (index.unsqueeze(-1) // span * span + torch.arange(span)).flatten(3)  # spans of neighbours, as QSA has
    mask = BlockMask.from_dense(live_of(index, heads[2], k_len, causal), block=16)

    def chosen(q, k, v):
        return token_attention(q, k, v, index, causal=causal, return_lse=True, backend="triton")

    with (
        mock.patch.object(gradients, "_WORTH", worth),
        mock.patch.object(gradients, "_add_tiles", side_effect=gradients._add_tiles) as by_tiles,
    ):
        testing.assert_exact(chosen, q, k, v, mask)
    assert by_tiles.called == (worth > 0)


@few
@given(HEADS, st.integers(1, 40), st.integers(1, 140), st.integers(1, 6), SEEDS)
def test_the_queries_of_a_tile_are_in_order(heads, q_len, k_len, choices, seed):
    (q, k, v), index = drawn(heads, q_len, k_len, (16, 16), choices, torch.float16, seed)
    of = sizes_of(q, k, v, 16, choices, 1.0, backward=True)
    live, tiles = live_of(index, 1, k_len, False).flatten(0, 1), -(-k_len // token_tiles.TILE)
    chosen = api.sorted_lists(index, k_len, False)
    lists = gradients.tiles_of(chosen, of, 0, len(live), q_len)
    begin = 0
    for n, rows in enumerate(live):
        for tile, of_tile in enumerate(rows.split(token_tiles.TILE, 1)):
            end = int(lists.ends[n * tiles + tile])
            assert lists.entries[begin:end].tolist() == of_tile.any(1).nonzero().flatten().tolist()
            begin = end


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_any_scale(scale):
    (q, k, v), index = drawn((1, 1, 2), 5, 20, (16, 16), 9, torch.float32, 0)
    mask = BlockMask.from_dense(live_of(index, 2, 20, True), block=16)

    def chosen(q, k, v):
        return token_attention(q, k, v, index, scale=scale, return_lse=True, backend="triton")

    testing.assert_exact(chosen, q, k, v, mask, scale=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dead", [slice(7, 8), slice(64, 128)])  # a token, and a whole tile of `_add_tiles`
def test_a_token_that_nobody_chose_is_never_read(dtype, dead):
    (q, k, v), index = drawn((1, 1, 2), 5, 150, (16, 16), 9, dtype, 0)
    index = index.masked_fill((index >= dead.start) & (index < dead.stop), -1)
    want = gradients_of((q, k, v), index)
    k[:, :, dead], v[:, :, dead] = torch.nan, torch.inf
    assert all(map(torch.equal, gradients_of((q, k, v), index), want))


def test_queries_of_a_later_chunk_may_lie_far_away(tmp_path):
    (q, k, v), index = drawn((1, 1, 1), 3, 64, (16, 16), 1, torch.float16, 0)
    stride = 1 << 30  # of a query: the third one begins a chunk, 2^31 numbers from the first
    # A file with holes has these addresses and no memory behind them.
    apart = torch.from_file(str(tmp_path / "q"), shared=True, size=2 * stride + 16, dtype=q.dtype)
    far = apart.as_strided(q.shape, (stride, stride, stride, 1)).copy_(q)
    want = gradients_of((q, k, v), index)
    with mock.patch.object(gradients, "_SCRATCH", 24):  # two queries a chunk
        assert all(map(torch.equal, gradients_of((far, k, v), index), want))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(("q_len", "k_len", "choices"), [(0, 40, 2), (3, 0, 2), (3, 40, 0)])
def test_no_queries_keys_or_choices_give_zeros_with_gradients(backend, q_len, k_len, choices):
    q, k, v = (torch.randn(1, h, n, 16, requires_grad=True) for h, n in ((4, q_len), (2, k_len), (2, k_len)))
    index = torch.zeros(2, q_len, choices, dtype=torch.int64)
    out, lse = token_attention(q, k, v, index, return_lse=True, causal=False, backend=backend)
    assert out.shape == q.shape and (out == 0).all() and (lse == -torch.inf).all()
    for gradient, x in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
        assert gradient.shape == x.shape and (gradient == 0).all()


def test_layouts_of_projections_are_read_as_they_are():
    (q, k, v), index = drawn((2, 2, 3), 5, 30, (16, 24), 9, torch.float32, 3)
    expected = gradients_of((q, k, v), index)
    by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    wide = index.new_zeros(*index.shape[:3], 18)
    wide[..., ::2] = index
    found = gradients_of(by_token, wide[..., ::2])
    assert found[0].stride(1) < found[0].stride(2)
    assert all(map(torch.equal, expected, found))


def test_the_operators_obey_pytorch():
    (q, k, v), index = drawn((1, 2, 2), 3, 10, (16, 16), 4, torch.float32, 0)
    for requires in (False, True):
        given = [x.clone().requires_grad_(requires) for x in (q, k, v)]
        torch.library.opcheck(torch.ops.sparseflash.token_attention.default, (*given, index, 16, True, 0.25))
    torch.library.opcheck(
        torch.ops.sparseflash.token_attention.default, (q, k.requires_grad_(), None, index, 16, True, 0.25)
    )


def test_a_compiled_graph_has_one_node():
    (q, k, _), index = drawn((1, 1, 2), 3, 10, (24, 16), 4, torch.float32, 0)

    def layer(q, k, index):
        return token_attention(q * 1.0, k, None, index, v_dim=16, backend="triton").sin()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for function in (layer, compiled):
        given = [x.clone().requires_grad_() for x in (q, k)]
        out = function(*given, index)
        results.append((out, *torch.autograd.grad(out.sum(), given)))
    assert all(map(torch.equal, *results))


def test_derivatives_that_have_no_kernels_are_refused():
    (q, k, v), index = drawn((1, 1, 2), 3, 10, (16, 16), 4, torch.float32, 0)
    q.requires_grad_()

    def layer(q):
        return token_attention(q, k, v, index, backend="triton").sum()

    (gradient,) = torch.autograd.grad(layer(q), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"gradients of gradients are not implemented by the triton backend"):
        gradient.sum().backward()
    with pytest.raises(NotImplementedError, match=r"torch\.func\.grad .* not implemented by the triton backend"):
        torch.func.grad(layer)(q.detach())
    with pytest.raises(NotImplementedError, match=r"forward-mode derivatives .* not implemented by the triton backend"):
        torch.func.jvp(layer, (q.detach(),), (q.detach(),))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@few
@given(
    HEADS, st.integers(1, 6), st.integers(1, 40), st.sampled_from([16, 24, 48]), st.integers(1, 12), st.booleans(),
    DTYPES, SEEDS,
)  # fmt: skip
def test_scores_of_tokens_are_products_with_their_gradients(
    backend, heads, q_len, k_len, dim, choices, causal, dtype, seed
):
    (q, k, _), index = drawn(heads, q_len, k_len, (dim, 16), choices, dtype, seed)
    live = live_of(index, heads[2], k_len, causal)

    def results(function, dtype):
        given = [x.to(dtype).requires_grad_() for x in (q, k)]
        scores = function(*given)
        upstream = torch.randn(scores.shape, generator=generator(seed)).to(scores.dtype)
        dead = scores == -torch.inf
        upstream = upstream.masked_fill(dead, torch.nan)
        gradients = torch.autograd.grad(scores, given, upstream)
        found = dict(zip(("scores", "dq", "dk"), (scores.detach().masked_fill(dead, 0.0), *gradients), strict=True))
        return found, dead

    def ours(q, k):
        scores, tokens = token_scores(q, k, index, causal=causal, backend=backend)
        assert scores.dtype == torch.promote_types(q.dtype, torch.float32) and tokens.dtype == torch.int32
        lists = [torch.arange(k_len)[row] for row in live[:, :: heads[2]].flatten(0, 2)]
        assert [x[x >= 0].tolist() for x in tokens.flatten(0, 2)] == [x.tolist() for x in lists]
        ours.tokens = tokens.repeat_interleave(heads[2], 1)
        return scores

    def plainly(q, k):
        scores = (q @ k.repeat_interleave(heads[2], 1).mT) * q.shape[-1] ** -0.5
        found = scores.gather(3, ours.tokens.clamp(min=0).long())
        return torch.where(ours.tokens >= 0, found, torch.full_like(found, -torch.inf))

    got, dead = results(ours, dtype)
    truth, _ = results(plainly, torch.float64)
    plain, _ = results(plainly, dtype)
    assert torch.equal(dead, ours.tokens < 0)
    compared = testing.compare_results(got, truth, plain, magnitudes=dict.fromkeys(got, 1.0))
    assert compared.exact, str(compared)


def test_gradients_of_scores_have_equal_bits_and_one_operator():
    (q, k, _), index = drawn((2, 2, 3), 5, 30, (16, 16), 9, torch.float32, 0)
    torch.library.opcheck(
        torch.ops.sparseflash.token_scores.default, (q.requires_grad_(), k.requires_grad_(), index, True, 0.25)
    )

    def gradients(index):
        scores, tokens = token_scores(q, k, index, backend="triton")
        return torch.autograd.grad(scores.masked_fill(tokens.repeat_interleave(3, 1) < 0, 0.0).square().sum(), (q, k))

    assert all(map(torch.equal, gradients(index), gradients(index.flip(-1))))
    empty, tokens = token_scores(q, k, index[..., :0], backend="triton")
    assert empty.shape == (2, 6, 5, 0) and tokens.shape == (2, 2, 5, 0)
    assert all((x == 0).all() for x in torch.autograd.grad(empty.sum(), (q, k)))


Q, K = torch.zeros(2, 4, 10, 16), torch.zeros(2, 2, 10, 16)
INDEX = torch.zeros(2, 10, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"index": INDEX.float()}, TypeError, r"index must be an integer tensor; got torch\.float32"),
        ({"index": INDEX[:, :9]}, ValueError, r"index must have shape \[2, 10, K\] or \[2, 2, 10, K\]; got \[2, 9"),
        ({"index": INDEX.to("meta")}, ValueError, r"index must be on q's device cpu; got meta"),
        ({"v": None}, ValueError, r"v_dim must be given if v is None: the number of columns of k"),
        ({"v": None, "v_dim": 17}, ValueError, r"v_dim must be from 1 to the 16 columns of k; got 17"),
        ({"v": None, "v_dim": 8.0}, TypeError, r"v_dim must be an integer number of columns; got 8\.0"),
        ({"v_dim": 8}, ValueError, r"v_dim must be given without v only; got 8 and a v with 16 columns"),
        ({"causal": 1}, TypeError, r"causal must be True or False; got 1"),
        ({"backend": "hopper"}, ValueError, r"backend must be 'triton', 'reference' or None; got 'hopper'"),
        ({"scores": 1}, TypeError, r"scores must not be given to token_attention: its kernels gather tokens"),
        ({"span": 64}, TypeError, r"span must not be given to token_attention: index lists tokens; blocks .* grouped"),
        ({"lengths": [3]}, TypeError, r"lengths must not be given to token_attention: -1 in index is no token"),
        (
            {"q": Q.to("meta"), "k": K.to("meta"), "v": K.to("meta"), "index": INDEX.to("meta")},
            RuntimeError,
            r"the kernels for chosen tokens run on NVIDIA GPUs; got tensors on meta\. Use backend='reference'",
        ),
        ({"q": Q.double(), "k": K.double(), "v": K.double()}, TypeError, r"takes fp16, bf16 and fp32; got fp64"),
        ({"q": torch.zeros(2, 514, 10, 16)}, ValueError, r"groups must be of at most 256 query heads .*; got 257"),
        ({"index": INDEX[..., :1].expand(2, 10, 8193)}, ValueError, r"index must list at most 8192 tokens .* got 8193"),
        (
            {"q": torch.zeros(2, 2, 10, 577), "k": torch.zeros(2, 2, 10, 577), "v": K},
            ValueError,
            r"head dims must be at most 256 for the triton backend in torch.float32; got D = 577 and Dv = 16\. Use",
        ),
    ],
)
def test_what_is_refused_and_why(arguments, error, message):
    given = {"q": Q, "k": K, "v": K, "index": INDEX, "backend": "triton"} | arguments
    with pytest.raises(error, match=message):
        token_attention(**given)


@given(
    st.integers(1, MOST_DIM), st.integers(1, MOST_DIM), st.integers(1, 256), st.sampled_from([2, 4]),
    st.sampled_from(["forward", "backward", "scores"]),
)  # fmt: skip
@example(576, 1, 128, 2, "scores")  # 64 keys in two stages would need 237,568 bytes
def test_tiles_cover_every_head_and_column(dim, v_dim, group, size, kernel):
    backward, v_dim = kernel == "backward", 1 if kernel == "scores" else v_dim
    low, high = pieces(dim)
    assert low + high >= dim and (high == 0 or low < dim)
    shared = shares_values(dim, v_dim) or kernel == "scores"
    shape, _, stages = shape_of(
        dim, v_dim, group, size=size, keep=size == 4, precision="tf32", shared=shared, backward=backward, far=False,
        memory=232448, scores=kernel == "scores",
    )  # fmt: skip
    assert dim == shape.LOW + shape.HIGH and shape.ROWS * shape.TILES >= group > shape.ROWS * (shape.TILES - 1)
    held = shape.ROWS * (low + high + (shape.PADDED_DV if backward else 0))
    gathered = stages * shape.BLOCK_N * (low + high + (0 if shared else shape.PADDED_DV))
    of_scores = shape.ROWS * shape.BLOCK_N * (4 if kernel == "scores" else size)
    assert (held + gathered) * size + of_scores <= 232448 or (shape.ROWS, shape.BLOCK_N, stages) == (16, 16, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("kv_heads", "group", "dims"),
    [(1, 128, (576, 512)), (4, 16, (128, 128)), (2, 8, (80, 96)), (1, 64, (192, 128)), (2, 12, (256, 256))],
)
def test_attention_to_chosen_tokens_is_exact_on_the_gpu(dtype, kv_heads, group, dims):
    if dtype == torch.float32 and max(dims) > 256:
        dims = (256, 256)
    g = torch.Generator("cuda").manual_seed(0)
    q_len, k_len = 130, 500
    shapes = [(1, kv_heads * group, q_len, dims[0]), *[(1, kv_heads, k_len, dim) for dim in dims]]
    q, k, v = (torch.randn(shape, generator=g, device="cuda").to(dtype) for shape in shapes)
    index = torch.randint(-1, k_len + 1, (1, kv_heads, q_len, 200), generator=g, device="cuda", dtype=torch.int32)
    mask = BlockMask.from_dense(live_of(index.cpu(), group, k_len, True), block=16).to("cuda")

    def chosen(q, k, v):
        return token_attention(q, k, v, index, return_lse=True)

    testing.assert_exact(chosen, q, k, v, mask)


@pytest.mark.gpu
@pytest.mark.parametrize(("dims", "group"), [((256, 256), 12), ((64, 64), 1), ((128, 128), 16)])
def test_gradients_by_tiles_of_tokens_have_equal_bits_on_the_gpu(dims, group):
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, heads, 3000, dim, generator=g, device="cuda").bfloat16()
        for heads, dim in ((2 * group, dims[0]), (2, dims[0]), (2, dims[1]), (2 * group, dims[1]))
    )
    index = torch.rand(1, 2, 3000, 750, generator=g, device="cuda").topk(100).indices.sort(-1).values
    index = (index.unsqueeze(-1) * 4 + torch.arange(4, device="cuda")).flatten(3).int()
    given = [x.requires_grad_() for x in (q, k, v)]
    out = token_attention(*given, index)
    found = []
    with mock.patch.object(gradients, "_add_tiles", side_effect=gradients._add_tiles) as by_tiles:
        for _ in range(10):
            found.append(torch.autograd.grad(out, given, dout, retain_graph=True))
    assert by_tiles.call_count == 10
    assert all(map(torch.equal, found[0], each) for each in found)
    with mock.patch.object(gradients, "_WORTH", 0):
        rows = torch.autograd.grad(out, given, dout)
    assert all((x - y).abs().max() <= 2**-6 * y.abs().max() for x, y in zip(found[0], rows))


@pytest.mark.gpu
def test_a_graph_of_chosen_tokens_is_replayed_with_other_choices():
    g = torch.Generator("cuda").manual_seed(0)
    q, k = (torch.randn(1, h, 300, 96, generator=g, device="cuda").half() for h in (16, 1))
    index = torch.randint(-1, 300, (1, 1, 300, 48), generator=g, device="cuda", dtype=torch.int32)

    def step():
        leaves = [x.detach().requires_grad_() for x in (q, k)]  # autograd keeps the stream of a leaf's first use
        out = token_attention(*leaves, None, index, v_dim=64)
        return out, *torch.autograd.grad(out.float().square().sum(), leaves)

    chosen = (torch.randint(-1, 300, index.shape, generator=generator(seed)) for seed in range(3))
    assert_replays_as_called(step, index.copy_, chosen)


@pytest.mark.gpu
@pytest.mark.parametrize(("dims", "group"), [((576, 512), 128), ((96, 64), 16)])
def test_shared_keys_and_values_repeat_their_bits_on_the_gpu(dims, group):
    g = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(1, group, 700, dims[0], generator=g, device="cuda").bfloat16()
    k = torch.randn(1, 1, 3000, dims[0], generator=g, device="cuda").bfloat16()
    index = torch.rand(1, 1, 700, 3000, generator=g, device="cuda").topk(512).indices.int()
    index[..., 0] = 0
    dout = torch.randn(1, group, 700, dims[1], generator=g, device="cuda").bfloat16()

    def gradients(function, dtype=torch.bfloat16):
        given = [x.to(dtype).requires_grad_() for x in (q, k)]
        out, _ = function(*given)
        return dict(zip(("out", "dq", "dk"), (out.detach(), *torch.autograd.grad(out, given, dout.to(dtype)))))

    def ours(q, k):
        return token_attention(q, k, None, index, v_dim=dims[1], return_lse=True)

    live = live_of(index.cpu(), 1, 3000, True).cuda()

    def plainly(q, k):
        return reference.attention_of_live(q, k, k[..., : dims[1]], live, q.shape[-1] ** -0.5)

    got, again = gradients(ours), gradients(ours)
    assert all(torch.equal(got[name], again[name]) for name in got)
    compared = testing.compare_results(got, gradients(plainly, torch.float64), gradients(plainly))
    assert compared.exact, str(compared)
