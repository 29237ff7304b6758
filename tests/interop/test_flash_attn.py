import re

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash import clear_caches
from sparseflash.interop.flash_attn import _kept, flash_attn_func, flash_attn_varlen_func
from sparseflash.interop.flash_attn_cache import flash_attn_with_kvcache
from sparseflash.interop.flash_attn_packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from sparseflash.interop.flash_attn_padding import pad_input, unpad_input
from sparseflash.varlen import _masks
from tests.interop.flash_definitions import defined, live_scores, turned


def drawn(*shapes, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def compare(ours, theirs, inputs):
    torch.testing.assert_close(ours, theirs)
    dout = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=ours.dtype)
    for a, b in zip(torch.autograd.grad(ours, inputs, dout), torch.autograd.grad(theirs, inputs, dout), strict=True):
        torch.testing.assert_close(a, b)


sides = st.integers(-1, 40)


@given(
    q_len=st.integers(1, 60), k_len=st.integers(1, 60), causal=st.booleans(), window=st.tuples(sides, sides),
    softcap=st.sampled_from([0.0, 2.0]), slopes=st.sampled_from(["", "[H]", "[B, H]"]), sink=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
@example(q_len=2, k_len=5, causal=True, window=(-1, -1), softcap=0.0, slopes="", sink=False, seed=0)
@example(q_len=5, k_len=2, causal=True, window=(-1, -1), softcap=0.0, slopes="", sink=False, seed=0)
@example(q_len=1, k_len=40, causal=True, window=(7, 9), softcap=0.0, slopes="[B, H]", sink=True, seed=0)
@example(q_len=40, k_len=3, causal=False, window=(0, -1), softcap=2.0, slopes="[H]", sink=False, seed=0)
def test_the_function_is_its_definition(q_len, k_len, causal, window, softcap, slopes, sink, seed):
    *inputs, logits = drawn((2, q_len, 4, 16), (2, k_len, 2, 16), (2, k_len, 2, 8), (4,), seed=seed)
    each = torch.rand(2, 4, generator=torch.Generator().manual_seed(seed)) if slopes == "[B, H]" else torch.rand(4)
    given = None if not slopes else each
    learned = logits if sink else None
    out, lse = flash_attn_func(
        *inputs, causal=causal, window_size=window, softcap=softcap, alibi_slopes=given, learnable_sink=learned,
        return_lse=True, block=16,
    )  # fmt: skip
    live = live_scores(q_len, k_len, causal, window)
    want = [
        defined(
            *(x[b] for x in inputs), live, softcap=softcap, sink=learned,
            slopes=None if given is None else given.expand(2, 4)[b],
        )
        for b in range(2)
    ]  # fmt: skip
    theirs = torch.stack([o for o, _ in want])
    compare(out, theirs, inputs)
    torch.testing.assert_close(lse, torch.stack([each for _, each in want]))


def test_the_documented_masks():
    ones = torch.ones(1, 5, 1, 16)
    causal = flash_attn_func(ones[:, :2], ones, torch.eye(5)[None, :, None], causal=True)
    assert (causal[0, :, 0] > 0).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    causal = flash_attn_func(ones, ones[:, :2], torch.eye(2)[None, :, None], causal=True)
    assert (causal[0, :, 0] > 0).int().tolist() == [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]


def sums_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=4),
    same=st.booleans(), causal=st.booleans(), window=st.tuples(sides, sides), softcap=st.sampled_from([0.0, 2.0]),
    slopes=st.sampled_from(["", "[H]", "[B, H]"]), seed=st.integers(0, 99),
)  # fmt: skip
@example(lengths=[(3, 5), (7, 2)], same=False, causal=True, window=(-1, -1), softcap=0.0, slopes="[H]", seed=0)
@example(lengths=[(3, 5), (7, 9)], same=False, causal=True, window=(2, -1), softcap=0.0, slopes="[B, H]", seed=0)
@example(lengths=[(9, 9), (0, 0), (7, 7)], same=True, causal=True, window=(-1, -1), softcap=0.0, slopes="[H]", seed=0)
@example(lengths=[(0, 4), (4, 0)], same=False, causal=False, window=(-1, -1), softcap=0.0, slopes="", seed=0)
def test_each_packed_sequence_is_a_call_of_its_own(lengths, same, causal, window, softcap, slopes, seed):
    lengths = [(q, q) for q, _ in lengths] if same else lengths
    q_sums, k_sums = sums_of([q for q, _ in lengths]), sums_of([k for _, k in lengths])
    q, k, v = inputs = drawn((q_sums[-1], 4, 16), (k_sums[-1], 2, 16), (k_sums[-1], 2, 16), seed=seed)
    each = torch.rand(len(lengths), 4, generator=torch.Generator().manual_seed(seed))
    given = {"": None, "[H]": each[0], "[B, H]": each}[slopes]
    out, lse = flash_attn_varlen_func(
        q, k, v, q_sums, k_sums, 30, 30, causal=causal, window_size=window, softcap=softcap, alibi_slopes=given,
        return_lse=True, block=16,
    )  # fmt: skip
    want = []
    for b, ((q_len, k_len), i, j) in enumerate(zip(lengths, q_sums.tolist(), k_sums.tolist())):
        own = None if given is None else given if given.ndim == 1 else given[b]
        live = live_scores(q_len, k_len, causal, window)
        want.append(defined(q[i : i + q_len], k[j : j + k_len], v[j : j + k_len], live, softcap=softcap, slopes=own))
    compare(out, torch.cat([o for o, _ in want]), inputs)
    torch.testing.assert_close(lse, torch.cat([each for _, each in want], 1))


@given(
    q_len=st.integers(1, 5), new=st.integers(0, 5), causal=st.booleans(), left=st.integers(-1, 20),
    way=st.sampled_from(["rows", "chosen rows", "pages"]), changed=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@example(q_len=3, new=0, causal=False, left=-1, way="pages", changed=True, seed=0)
@example(q_len=3, new=3, causal=True, left=4, way="chosen rows", changed=True, seed=1)
def test_decoding_is_its_definition_and_writes_the_new_keys(q_len, new, causal, left, way, changed, seed):
    room, page = 48, 16
    generator = torch.Generator().manual_seed(seed)
    left = left if causal or q_len == 1 else -1
    q, k, v = (x.detach() for x in drawn((2, q_len, 4, 16), (2, new, 2, 16), (2, new, 2, 16), seed=seed))
    k_cache, v_cache = (x.detach() for x in drawn((2, room, 2, 16), (2, room, 2, 16), seed=seed + 1))
    filled = torch.randint(q_len, room - new + 1, (2,), generator=generator, dtype=torch.int32)
    pad = torch.minimum(torch.randint(0, room, (2,), generator=generator, dtype=torch.int32), filled)
    options, stored = {}, [k_cache.clone(), v_cache.clone()]
    if way == "chosen rows":
        rows = torch.randperm(5, generator=generator)[:2].int()
        options["cache_batch_idx"] = rows
        stored = [torch.zeros(5, room, 2, 16, dtype=torch.float64).index_copy(0, rows.long(), x) for x in stored]
    elif way == "pages":
        table = torch.randperm(9, generator=generator)[:6].view(2, 3)
        options["block_table"] = table.int()
        stored = [
            torch.zeros(9, page, 2, 16, dtype=torch.float64).index_copy(0, table.flatten(), x.reshape(6, page, 2, 16))
            for x in stored
        ]
    given = {"k": k, "v": v} if new else {}
    scored = {"softcap": 2.0, "sink": torch.randn(4, generator=generator, dtype=torch.float64)} if changed else {}
    if changed and (causal or q_len == 1):
        scored["slopes"] = torch.rand(4, generator=generator)
    names = {"softcap": "softcap", "sink": "learnable_sink", "slopes": "alibi_slopes"}
    options |= {names[name]: value for name, value in scored.items()}
    out, lse = flash_attn_with_kvcache(
        q, *stored, **given, cache_seqlens=filled, cache_leftpad=pad, causal=causal, window_size=(left, -1),
        return_softmax_lse=True, **options,
    )  # fmt: skip
    for b, n in enumerate((filled + new).tolist()):
        for cache, fresh in ((k_cache, k), (v_cache, v)):
            cache[b, n - new : n] = fresh[b]
        live = live_scores(q_len, n, causal, (left, -1)) & (torch.arange(n) >= pad[b])
        want, want_lse = defined(q[b], k_cache[b, :n], v_cache[b, :n], live, **scored)
        torch.testing.assert_close(out[b], want)
        torch.testing.assert_close(lse[b], want_lse.to(lse.dtype))
    now = stored
    if way == "chosen rows":
        now = [x[rows.long()] for x in stored]
    elif way == "pages":
        now = [x[table].flatten(1, 2) for x in stored]
    assert torch.equal(now[0], k_cache) and torch.equal(now[1], v_cache)


@given(
    new=st.integers(1, 4), half=st.sampled_from([2, 5, 8]), interleaved=st.booleans(), causal=st.booleans(),
    pages=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_new_keys_and_queries_are_rotated_by_their_positions(new, half, interleaved, causal, pages, seed):
    q, k, v = (x.detach() for x in drawn((2, new, 4, 16), (2, new, 2, 16), (2, new, 2, 16), seed=seed))
    k_cache, v_cache = (x.detach() for x in drawn((2, 32, 2, 16), (2, 32, 2, 16), seed=seed + 1))
    filled = torch.randint(new, 32 - new, (2,), generator=torch.Generator().manual_seed(seed))
    angle = torch.arange(40.0, dtype=torch.float64)[:, None] / 10 ** torch.arange(half)
    cos, sin = angle.cos(), angle.sin()
    stored = [x.clone() for x in (k_cache, v_cache)]
    table = torch.tensor([[3, 1], [0, 2]])
    if pages:
        stored = [torch.zeros(4, 16, 2, 16, dtype=x.dtype).index_copy(0, table.flatten(), x.reshape(4, 16, 2, 16))
                  for x in stored]  # fmt: skip
    out = flash_attn_with_kvcache(
        q, *stored, k, v, cos, sin, filled, block_table=table if pages else None, causal=causal,
        rotary_interleaved=interleaved,
    )  # fmt: skip
    now = [x[table].flatten(1, 2) for x in stored] if pages else stored
    for b, n in enumerate(filled.tolist()):
        at = n + torch.arange(new)
        k_cache[b, n : n + new], v_cache[b, n : n + new] = turned(k[b], cos, sin, at, interleaved), v[b]
        own = turned(q[b], cos, sin, at if causal else torch.full_like(at, n), interleaved)
        live = live_scores(new, n + new, causal, (-1, -1))
        torch.testing.assert_close(out[b], defined(own, k_cache[b, : n + new], v_cache[b, : n + new], live)[0])
    torch.testing.assert_close(now, [k_cache, v_cache])


@pytest.mark.parametrize("slopes", [False, True])
def test_tokens_past_the_packed_sequences_are_padding(slopes):
    q, k, v = inputs = drawn((50, 4, 16), (45, 2, 16), (45, 2, 16))
    given = torch.rand(4) if slopes else None
    sums, k_sums = sums_of([13, 20]), sums_of([10, 25])
    options = {"causal": True, "alibi_slopes": given, "return_lse": True, "block": 16}
    out, lse = flash_attn_varlen_func(q, k, v, sums, k_sums, 20, 25, **options)
    want, want_lse = flash_attn_varlen_func(q[:33], k[:35], v[:35], sums, k_sums, 20, 25, **options)
    assert torch.equal(out[:33], want) and torch.equal(lse[:, :33], want_lse)
    assert not out[33:].any() and bool((lse[:, 33:] == -torch.inf).all())
    got, theirs = (torch.autograd.grad(x.sum(), inputs, retain_graph=True) for x in (out, want))
    for a, b in zip(got, theirs, strict=True):
        assert torch.equal(a, b) and not a[35:].any()


@pytest.mark.parametrize(("lengths", "k_lengths"), [([0, 0], [20, 15]), ([13, 20], [0, 0]), ([0, 0], [0, 0])])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 3)}, {"alibi_slopes": torch.ones(2, 4)}])
def test_all_tokens_may_be_padding(lengths, k_lengths, options):
    inputs = drawn((50, 4, 16), (45, 2, 16), (45, 2, 16))
    out, lse = flash_attn_varlen_func(
        *inputs, sums_of(lengths), sums_of(k_lengths), 20, 25, return_lse=True, block=16, **options
    )  # fmt: skip
    assert out.shape == (50, 4, 16) and not out.any() and bool((lse == -torch.inf).all())
    assert not any(x.any() for x in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize("new", [(3, 3), (2, 9)])
def test_packed_queries_read_pages(new):
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(2, 6, 16, 2, 16, generator=generator, dtype=torch.float64)
    q = torch.randn(sum(new), 4, 16, generator=generator, dtype=torch.float64)
    table, sums, k_sums = torch.tensor([[4, 0, 2], [1, 5, 3]]), sums_of(new), sums_of([40, 21])
    out, lse = flash_attn_varlen_func(
        q, *pages, sums, k_sums, max(new), 40, causal=True, window_size=(17, 0), block_table=table, return_lse=True
    )
    for b, (n, length) in enumerate(zip(new, (40, 21))):
        k, v = (x[table[b]].flatten(0, 1)[:length] for x in pages)
        want, want_lse = defined(q[sums[b] : sums[b + 1]], k, v, live_scores(n, length, True, (17, 0)))
        torch.testing.assert_close(out[sums[b] : sums[b + 1]], want)
        torch.testing.assert_close(lse[:, sums[b] : sums[b + 1]].double(), want_lse, rtol=1e-6, atol=1e-6)


def test_masks_are_made_once():
    clear_caches()  # a full cache is emptied by its next mask
    q, k, v = drawn((1, 40, 2, 16), (1, 40, 2, 16), (1, 40, 2, 16))
    made = []
    for _ in range(2):
        flash_attn_func(q, k, v, window_size=(5, 3), block=16)
        made.append(_kept(40, 40, 5, 3, 16, q.device))
        for window, causal in (((3, 2), False), ((-1, -1), True)):
            flash_attn_varlen_func(*(x[0] for x in (q, k, v)), [0, 9, 40], [0, 9, 40], 31, 31,
                                   window_size=window, causal=causal, block=16)  # fmt: skip
        kept = set(map(id, _masks.values()))
        made.append(kept)
    assert made[0] is made[2] and made[1] == made[3]


def test_other_results():
    q, k, v = drawn((1, 20, 2, 16), (1, 20, 2, 16), (1, 20, 2, 16))
    out, lse, weights = flash_attn_func(q, k, v, 0.0, 0.3, return_attn_probs=True, deterministic=True)
    live = torch.ones(20, 20, dtype=torch.bool)
    torch.testing.assert_close(out[0], defined(q[0], k[0], v[0], live, scale=0.3)[0])
    assert lse.shape == (1, 2, 20) and weights is None
    dropped = flash_attn_func(q, k, torch.ones_like(v), 0.5)
    assert dropped.std() > 0.05  # without dropout every row is 1
    none = flash_attn_func(q[:, :0], k, v, causal=True)
    assert none.shape == (1, 0, 2, 16)
    q, k, v = (x.detach() for x in (q, k, v))
    full = flash_attn_with_kvcache(q[:, :1], k, v)
    as_number = flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=20)
    assert torch.equal(full, as_number)


def test_it_compiles_without_a_graph_break():
    (q,) = drawn((1, 40, 2, 16))

    def layer(q):
        return flash_attn_func(q, q, q, causal=True, window_size=(9, 0), softcap=3.0, block=16).square().sum()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    (want,), (got,) = (torch.autograd.grad(each(q), q) for each in (layer, compiled))
    torch.testing.assert_close(got, want)


Q = torch.zeros(1, 8, 2, 16)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: flash_attn_func(Q[0], Q, Q), ValueError, "q must have shape [batch, tokens, heads, head dim]; got [8"),
        (lambda: flash_attn_func(Q, Q, Q, window_size=4), TypeError, "window_size must be (left, right), two ints"),
        (lambda: flash_attn_func(Q, Q, Q, causal=1), TypeError, "causal must be True or False; got 1"),
        (
            lambda: flash_attn_func(Q, Q, Q, alibi_slopes=torch.ones(3, 2)),
            ValueError,
            "alibi_slopes must have shape [Hq] or [1, 2]; got [3, 2].",
        ),
        (
            lambda: flash_attn_func(Q, Q, Q, 0.5, return_attn_probs=True),
            ValueError,
            "dropout_p must be 0 with return_attn_probs=True, because the weights are never all in memory; got 0.5.",
        ),
        (
            lambda: flash_attn_varlen_func(Q, Q, Q, [0, 8], [0, 8]),
            ValueError,
            "q must have shape [tokens, heads, head dim]; got [1, 8, 2, 16].",
        ),
        (
            lambda: flash_attn_varlen_func(Q[0], Q[0], Q[0], [0, 7], [0, 9]),
            ValueError,
            "cu_seqlens_q and cu_seqlens_k must end with the numbers of tokens, 8 and 8, or before padding; got 7 and "
            "9.",
        ),
        (
            lambda: flash_attn_varlen_func(Q[0], Q, Q, [0, 8], [0, 8], block_table=torch.zeros(1, 1).int()),
            ValueError,
            "max_seqlen_q must be given with a block_table; got None.",
        ),
        (
            lambda: flash_attn_with_kvcache(Q, Q, Q, rotary_cos=Q, rotary_sin=Q),
            ValueError,
            "k and v must be given with rotary_cos, which rotates them; got None.",
        ),
        (
            lambda: flash_attn_with_kvcache(Q, Q, Q, Q, Q, Q[0, :, 0], cache_seqlens=0),
            ValueError,
            "rotary_cos and rotary_sin must be given together; got 'one'.",
        ),
        (
            lambda: flash_attn_with_kvcache(Q, Q, Q, Q, Q, Q[0, :, 0], Q[0, :, 0], cache_seqlens=0),
            ValueError,
            "rotary_cos and rotary_sin must have shape [positions, half of the rotated features], at most 8 of them; "
            "got [8, 16] and [8, 16].",
        ),
        (
            lambda: flash_attn_with_kvcache(Q, Q, Q, alibi_slopes=torch.ones(2)),
            ValueError,
            "alibi_slopes must be None for several queries without causal; got 'a tensor of slopes'.",
        ),
        (lambda: flash_attn_with_kvcache(Q, Q, Q, Q), ValueError, "k and v must be given together; got 'one of them'."),
        (
            lambda: flash_attn_with_kvcache(Q, Q, Q, Q, Q),
            ValueError,
            "cache_seqlens must be given with new keys; got None.",
        ),
        (
            lambda: flash_attn_with_kvcache(Q, Q, Q, cache_seqlens=8, window_size=(4, -1)),
            ValueError,
            "window_size must be (-1, -1) or end at the query, (left, 0), for several queries without causal; got "
            "(4, -1).",
        ),
        (
            lambda: flash_attn_with_kvcache(Q, Q, Q, cache_batch_idx=Q, block_table=Q),
            ValueError,
            "cache_batch_idx must be None with a block_table; got 'both'.",
        ),
    ],
)
def test_what_cannot_be_taken_is_refused_in_a_sentence(call, error, words):
    with pytest.raises(error, match=re.escape(words)):
        call()


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_the_kernels_take_slopes_of_each_batch_element_and_sequence(packed):
    q, k, v = (x.detach().half() for x in drawn((2, 30, 4, 16), (2, 40, 2, 16), (2, 40, 2, 16)))
    slopes = torch.rand(2, 4)
    if packed:
        sums = [0, 30, 60], [0, 40, 80]
        out = flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in (q, k, v)), *sums, causal=True, alibi_slopes=slopes, block=16, backend="triton"
        ).view_as(q)
    else:
        out = flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, block=16, backend="triton")
    live = live_scores(30, 40, True, (-1, -1))
    for b in range(2):
        want, _ = defined(*(x[b].double() for x in (q, k, v)), live, slopes=slopes[b])
        assert (out[b].double() - want).abs().max() < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("slopes", [(4,), (2, 4)], ids=["[H]", "[B, H]"])
def test_on_a_gpu_both_calls_are_their_definition(slopes):
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, 300, heads, 64, generator=generator, device="cuda", dtype=torch.float16) for heads in (4, 2, 2)
    )
    each = torch.rand(slopes, generator=generator, device="cuda") / 4
    out = flash_attn_func(q, k, v, causal=True, window_size=(90, 0), softcap=5.0, alibi_slopes=each)
    live = live_scores(300, 300, True, (90, 0))
    sums = torch.tensor([0, 300, 600], dtype=torch.int32, device="cuda")
    packed = flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)), sums, sums, 300, 300, causal=True, window_size=(90, 0), softcap=5.0,
        alibi_slopes=each,
    )  # fmt: skip
    for b in range(2):
        own = each.cpu() if each.ndim == 1 else each[b].cpu()
        want, _ = defined(*(x[b].cpu().double() for x in (q, k, v)), live, softcap=5.0, slopes=own)
        for got in (out[b], packed.view_as(out)[b]):
            assert (got.cpu().double() - want).abs().max() < 4e-3  # fp16


def test_padded_sequences_are_packed_and_padded_again():
    """As models call it: unpad, packed attention, pad; against each sequence alone, with gradients."""
    (qkv,) = drawn((3, 20, 3, 4, 16))
    lengths = torch.tensor([20, 0, 13])
    mask = torch.arange(20) < lengths[:, None]
    packed, indices, sums, longest, used = unpad_input(qkv, mask)
    assert (sums.tolist(), longest, used.tolist()) == ([0, 20, 20, 33], 20, [20, 0, 13])
    out = pad_input(flash_attn_varlen_qkvpacked_func(packed, sums, longest, causal=True), indices, 3, 20)
    own = [defined(*x[:n].unbind(1), live_scores(n, n, True, (-1, -1)))[0] for x, n in zip(qkv, lengths.tolist())]
    compare(out, torch.stack([torch.cat([x, x.new_zeros(20 - len(x), 4, 16)]) for x in own]), [qkv])
    both = unpad_input(qkv, mask.int(), (torch.arange(20) == 19).expand(3, 20).int() * (lengths[:, None] < 20))
    assert both[2].tolist() == [0, 20, 21, 35] and both[4].tolist() == [20, 0, 13]
    with pytest.raises(ValueError, match=re.escape("attention_mask must have shape [B, N], here [3, 20]; got [3, 1")):
        unpad_input(qkv, mask[:, :19])


def test_packed_queries_keys_and_values_are_those_apart():
    (qkv,) = drawn((2, 30, 3, 4, 16))
    q, kv = qkv[:, :, 0], qkv[:, :, 1:]
    window = (0.0, 0.3, True, (7, 0))
    want = flash_attn_func(*qkv.unbind(2), *window)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, *window), want)
    assert torch.equal(flash_attn_kvpacked_func(q, kv, *window), want)
    sums = torch.tensor([0, 13, 60])
    rows, q, kv = (x.flatten(0, 1) for x in (qkv, q, kv))
    want = flash_attn_varlen_func(*rows.unbind(1), sums, sums, 47, 47, *window)
    assert torch.equal(flash_attn_varlen_qkvpacked_func(rows, sums, 47, *window), want)
    assert torch.equal(flash_attn_varlen_kvpacked_func(q, kv, sums, sums, 47, 47, *window), want)
    with pytest.raises(ValueError, match=r"qkv must have shape \[batch, tokens, 3, heads, head dim\]; got \[60, 3"):
        flash_attn_qkvpacked_func(rows)
