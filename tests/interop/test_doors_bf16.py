"""Every door of a neighbour in bf16, against its definition: dense in fp64 on the CPU, with all gradients.

The allowed error is twice the definition's error in bf16, plus one unit in the last place.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from torch.nn.attention import flex_attention as theirs
from torch.nn.functional import scaled_dot_product_attention

from sparseflash import grouped, scores
from sparseflash.interop import (
    fastvideo,
    flash_attn,
    flash_attn_cache,
    flash_attn_packed,
    natten,
    sglang,
    vllm,
    xformers,
)
from sparseflash.interop.flex_attention import create_block_mask, flex_attention
from sparseflash.scaled_dot_product import sdpa
from sparseflash.testing import draws_for
from sparseflash.testing.comparison import compare_with_draws
from tests.interop import test_natten, test_xformers
from tests.interop.flash_definitions import defined, live_scores, turned

ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
B, H, HKV, N, D = 2, 4, 2, 300, 64
SUMS = [0, 13, 213, N]
Q, K = (B, N, H, D), (B, N, HKV, D)
HEADS_FIRST = (B, H, N, D), (B, HKV, N, D)


@dataclass
class Door:
    call: object
    definition: object
    shapes: tuple
    learned: tuple = ()
    gradients: bool = True

    def drawn(self, seed, dtype, device):
        generator = torch.Generator().manual_seed(seed)
        made = [torch.randn(shape, generator=generator).bfloat16() for shape in self.shapes]
        made += [torch.rand(shape, generator=generator) + 0.5 for shape in self.learned]
        wide = [x.to(device, dtype if dtype == torch.float64 or x.dtype == torch.bfloat16 else x.dtype) for x in made]
        return [x.requires_grad_(self.gradients) for x in wide]

    def results(self, function, seed, dtype, device):
        leaves = self.drawn(seed, dtype, device)
        found = function(*leaves)
        found = found if isinstance(found, tuple) else (found,)
        named = dict(zip(("out", "lse"), found, strict=False))
        if self.gradients:
            generator = torch.Generator().manual_seed(seed + 1000)
            douts = [torch.randn(x.shape, generator=generator).bfloat16().to(device, x.dtype) for x in found]
            names = [f"d{number}" for number in range(len(leaves))]
            named |= zip(names, torch.autograd.grad(found, leaves, douts), strict=True)
        return {name: x.detach().cpu() for name, x in named.items()}


def dense(q, k, v, live, change=lambda s: s, sink=None, scale=None):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = change(q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale))
    s = s.masked_fill(~live.to(s.device), -torch.inf)
    if sink is not None:
        s = torch.cat([s, sink.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)], -1)
    weights = s.softmax(-1)[..., : k.shape[2]]
    return weights @ v, s.logsumexp(-1)


def tokens_first(q, k, v, *others, **options):
    out, lse = dense(*(x.transpose(1, 2) for x in (q, k, v)), *others, **options)
    return out.transpose(1, 2), lse


def distances(q_len=N, k_len=N):
    return torch.arange(q_len)[:, None] + k_len - q_len - torch.arange(k_len)


CAUSAL = distances() >= 0
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
DOCUMENT = torch.bucketize(torch.arange(N), torch.tensor(SUMS[1:-1]), right=True)
SAME = DOCUMENT[:, None] == DOCUMENT


def capped(s, slopes=None, distance=None):
    s = 5 * torch.tanh(s / 5)
    return s if slopes is None else s - (slopes[:, None, None] * distance.abs()).to(s)


def on(x, q):
    return x.to(q.device)


def flash(q, k, v):
    return flash_attn.flash_attn_func(
        q, k, v, causal=True, window_size=(90, 0), softcap=5.0, alibi_slopes=on(SLOPES, q), return_lse=True
    )


def flash_defined(q, k, v):
    apart = distances()
    return tokens_first(q, k, v, CAUSAL & (apart <= 90), lambda s: capped(s, SLOPES, apart))


def flash_short(q, k, v, sink):
    return flash_attn.flash_attn_func(q, k, v, causal=True, learnable_sink=sink, return_lse=True)


def flash_short_defined(q, k, v, sink):
    return tokens_first(q, k, v, distances(70) >= 0, sink=sink)


def flash_varlen(q, k, v):
    sums = torch.tensor(SUMS, dtype=torch.int32, device=q.device)
    return flash_attn.flash_attn_varlen_func(
        q, k, v, sums, sums, 200, 200, causal=True, window_size=(50, 0), alibi_slopes=on(SLOPES, q)
    )


def flash_varlen_defined(q, k, v):
    apart = distances()
    live = SAME & CAUSAL & (apart <= 50)
    out, _ = tokens_first(q[None], k[None], v[None], live, lambda s: s - (SLOPES[:, None, None] * apart.abs()).to(s))
    return out[0]


def flash_packed(qkv):
    return flash_attn_packed.flash_attn_qkvpacked_func(qkv, causal=True)


def flash_packed_defined(qkv):
    return tokens_first(*qkv.unbind(2), CAUSAL)[0]


LENGTHS = torch.tensor([170, 33])


def cached(page):
    def call(q, k, v, new_k, new_v):
        k, v = k.clone(), v.clone()
        table = None
        if page:
            order = torch.randperm(B * N // page, generator=torch.Generator().manual_seed(0), device="cpu").to(q.device)
            table = order.argsort().view(B, -1).int()
            k, v = (x.reshape(-1, page, HKV, D)[order].contiguous() for x in (k, v))
        return flash_attn_cache.flash_attn_with_kvcache(
            q, k, v, new_k, new_v, cache_seqlens=on(LENGTHS, q), block_table=table, causal=True, softcap=5.0,
            window_size=(100, 0), alibi_slopes=on(SLOPES, q), return_softmax_lse=True,
        )  # fmt: skip

    return call


def cached_defined(q, k, v, new_k, new_v):
    found = []
    for b, length in enumerate(LENGTHS.tolist()):
        keys, values = torch.cat([k[b, :length], new_k[b]])[None], torch.cat([v[b, :length], new_v[b]])[None]
        apart = distances(3, length + 3)
        live = (apart >= 0) & (apart <= 100)
        found.append(tokens_first(q[b : b + 1], keys, values, live, lambda s: capped(s, SLOPES, apart)))  # noqa: B023
    return tuple(map(torch.cat, zip(*found)))


ANGLE = torch.arange(N)[:, None] / 10.0 ** torch.arange(16)


def rotary(q, k, v, new_k, new_v):
    cos, sin = on(ANGLE.cos(), q), on(ANGLE.sin(), q)
    return flash_attn_cache.flash_attn_with_kvcache(
        q, k.clone(), v.clone(), new_k, new_v, cos, sin, on(LENGTHS, q), causal=True, rotary_interleaved=False
    )


def rotary_defined(q, k, v, new_k, new_v):
    found = []
    for b, length in enumerate(LENGTHS.tolist()):
        at = torch.arange(length, length + 3)
        own, fresh = (turned(x[b], ANGLE.cos().to(x.dtype), ANGLE.sin().to(x.dtype), at, False) for x in (q, new_k))
        keys, values = torch.cat([k[b, :length], fresh])[None], torch.cat([v[b, :length], new_v[b]])[None]
        found.append(tokens_first(own[None], keys, values, distances(3, length + 3) >= 0)[0])
    return torch.cat(found)


GRAPH = torch.randint(0, 8, (B, N, N), generator=torch.Generator().manual_seed(0))


def flex(made):
    def call(q, k, v):
        slopes, document = on(SLOPES, q), on(DOCUMENT, q)
        rule = lambda b, h, i, j: (i >= j) & (document[i] == document[j])  # noqa: E731
        mask = made(rule, None, None, N, N, device=q.device)
        mod = lambda s, b, h, i, j: 5 * torch.tanh(s / 5) - slopes[h] * (i - j)  # noqa: E731
        return flex_attention(q, k, v, mod, mask, enable_gqa=True, return_aux=theirs.AuxRequest(lse=True))

    def with_lse(q, k, v):
        out, aux = call(q, k, v)
        return out, aux.lse

    return with_lse


def flex_defined(q, k, v):
    return dense(q, k, v, SAME & CAUSAL, lambda s: capped(s, SLOPES, distances()))


def flex_learned(q, k, v, table):
    graph = on(GRAPH, q)
    return flex_attention(q, k, v, lambda s, b, h, i, j: s + table[h, graph[b, i, j]], enable_gqa=True)


def flex_learned_defined(q, k, v, table):
    every = torch.ones(N, N, dtype=torch.bool)
    added = table[:, on(GRAPH, q)].transpose(0, 1)
    return dense(q, k, v, every, lambda s: s + added.to(s.dtype))[0]


def flex_products(q, k, v, own, other):
    mod = lambda s, b, h, i, j: torch.nn.functional.gelu(s + torch.dot(own[b, h, i], other[b, 0, j]))  # noqa: E731
    return flex_attention(q, k, v, mod, enable_gqa=True)


def flex_products_defined(q, k, v, own, other):
    every = torch.ones(N, N, dtype=torch.bool)
    return dense(q, k, v, every, lambda s: torch.nn.functional.gelu(s + own @ other.mT))[0]


def na2d(q, k, v, more_k, more_v):
    return natten.na2d(
        q, k, v, kernel_size=(5, 7), dilation=(1, 2), is_causal=(True, False), additional_keys=more_k,
        additional_values=more_v,
    )  # fmt: skip


def na2d_defined(q, k, v, more_k, more_v):
    live = test_natten.grid_live((15, 20), (5, 7), (1, 1), (1, 2), (True, False))
    live = torch.cat([live, torch.ones(N, more_k.shape[1], dtype=torch.bool)], 1)
    q, k, v = (x.flatten(1, 2) for x in (q, k, v))
    out, _ = tokens_first(q, torch.cat([k, more_k], 1), torch.cat([v, more_v], 1), live)
    return out.unflatten(1, (15, 20))


def na(axes, grid, **options):
    rule = {"kernel_size": 5, "stride": 1, "dilation": 1, "is_causal": False, **options}

    def call(q, k, v):
        return getattr(natten, f"na{axes}d")(q, k, v, **rule)

    def definition(q, k, v):
        live = test_natten.grid_live(grid, *((each,) * axes for each in rule.values()))
        out, _ = tokens_first(*(x.flatten(1, axes) for x in (q, k, v)), live)
        return out.unflatten(1, grid)

    return Door(call, definition, ((B, *grid, H, D), (B, *grid, HKV, D), (B, *grid, HKV, D)))


def blocks(q, k, v):
    bias = test_xformers.bias_of("BlockDiagonalCausalMask", [13, 200, 87], [13, 200, 87], 0)
    return xformers.memory_efficient_attention(q, k, v, bias)


def blocks_defined(q, k, v):
    return tokens_first(q, k, v, SAME & CAUSAL)[0]


def added(q, k, v, bias):
    return xformers.memory_efficient_attention(q, k, v, bias.masked_fill(on(~CAUSAL, q), -torch.inf))


def added_defined(q, k, v, bias):
    return tokens_first(q, k, v, CAUSAL, lambda s: s + bias)[0]


LISTS = torch.rand(B, H, 5, 5, generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :3]
SIZES = torch.tensor([64, 64, 40, 64, 7])


def video(q, k, v):
    counts = torch.tensor([3, 2, 1, 3, 3], device=q.device).expand(B, H, 5)
    return fastvideo.block_sparse_attn_from_indices(q, k, v, on(LISTS, q).int(), counts.int(), on(SIZES, q))


def video_defined(q, k, v):
    chosen = torch.zeros(B, H, 5, 5, dtype=torch.bool)
    for row, count in enumerate([3, 2, 1, 3, 3]):
        chosen[:, :, row].scatter_(-1, LISTS[:, :, row, :count], True)
    live = chosen.repeat_interleave(64, 2).repeat_interleave(64, 3)
    live &= torch.arange(64).expand(5, 64).lt(SIZES[:, None]).flatten()
    out, lse = dense(q, k, v, live)
    return out, lse / math.log(2)


# PyTorch's scaled_dot_product_attention, which is its own definition
def torch_defined(**options):
    return lambda *tensors: scaled_dot_product_attention(*tensors, enable_gqa=True, **options)


def ours(**options):
    return lambda *tensors: sdpa(*tensors, enable_gqa=True, **options)


def engine(door, page, new):
    """The last `new` tokens of each sequence, whose keys lie in pages in any order."""
    lengths = LENGTHS.tolist()

    def call(q, k, v):
        device = q.device
        order = torch.randperm(B * N // page, generator=torch.Generator().manual_seed(0)).to(device)
        k, v = (x.reshape(-1, page, HKV, D)[order].contiguous() for x in (k, v))
        table = order.argsort().view(B, -1).int()
        sums = torch.tensor([0, *new], device=device).cumsum(0).int()
        if door == "vllm":
            return vllm.flash_attn_varlen_func(
                q, k, v, max(new), sums, max(lengths), seqused_k=on(LENGTHS, q), block_table=table, causal=True,
                softcap=5.0, window_size=[100, 0],
            )  # fmt: skip
        if door == "sglang":
            return sglang.flash_attn_with_kvcache(
                q, k, v, cache_seqlens=on(LENGTHS, q), page_table=table, cu_seqlens_q=sums, max_seqlen_q=max(new),
                causal=True, softcap=5.0, window_size=(100, 0),
            )  # fmt: skip
        slots = (table[:, :, None] * page + torch.arange(page, device=device)).flatten(1)
        return sglang.decode_attention(
            q, k.flatten(0, 1), v.flatten(0, 1), slots, torch.arange(B, device=device), on(LENGTHS, q), page_size=page,
            logit_cap=5.0, window_size=101,
        )  # fmt: skip

    def definition(q, k, v):
        found, first = [], 0
        for b, (length, n) in enumerate(zip(lengths, new)):
            apart = distances(n, length)
            live = (apart >= 0) & (apart <= 100)
            own = q[first : first + n], k[b, :length], v[b, :length]
            found.append(tokens_first(*(x[None] for x in own), live, capped)[0][0])
            first += n
        return torch.cat(found)

    return Door(call, definition, ((sum(new), H, D), K, K), gradients=False)


# blocks chosen for each query

INDEX = torch.randint(0, 13, (HKV, N, 3), generator=torch.Generator().manual_seed(0))
INDEX[..., 0] = (torch.arange(N) - torch.tensor(SUMS)[DOCUMENT]) // 16


def chosen(q, k, v, temperature, sink):
    return grouped.selected_attention(
        q, k, v, on(INDEX, q), span=16, cu_seqlens=torch.tensor(SUMS, device=q.device), return_lse=True,
        scores=scores.temperature(temperature) + scores.softcap(5.0) + scores.sink(sink),
    )  # fmt: skip


def chosen_defined(q, k, v, temperature, sink):
    at = torch.arange(N) - torch.tensor(SUMS)[DOCUMENT]
    listed = (at // 16 == INDEX[..., None]).any(-2)
    live = (listed & SAME & CAUSAL).repeat_interleave(H // HKV, 0)
    return dense(q, k, v, live, lambda s: capped(s / temperature.to(s.dtype)[:, None, None]), sink=sink)


def chosen_by_place(q, k, v, slopes, gain):
    change = scores.alibi(slopes) + scores.function(lambda s, b, h, i, j, gain: s * gain[h] + 0.1 * (i % 3), gain)
    return grouped.selected_attention(q, k, v, on(INDEX, q), span=16, return_lse=True, scores=change)


def chosen_by_place_defined(q, k, v, slopes, gain):
    at = torch.arange(N)
    listed = (at // 16 == INDEX[..., None]).any(-2) & CAUSAL
    apart, rows = on(distances(), q), on(at[:, None] % 3 * 0.1, q)
    heads = [x.to(q.dtype)[:, None, None] for x in (slopes, gain)]
    found, lse = dense(
        q, k, v, listed.repeat_interleave(H // HKV, 0),
        lambda s: (s - heads[0] * apart.abs().to(s.dtype)) * heads[1] + rows.to(s.dtype),
    )  # fmt: skip
    return found, lse


QKV = Q, K, K
HEADS = HEADS_FIRST[0], HEADS_FIRST[1], HEADS_FIRST[1]
SAME_HEADS = (Q,) * 3
DOORS = {
    "flash_attn_func": Door(flash, flash_defined, QKV),
    "flash_attn_func, fewer queries, a learned sink": Door(
        flash_short, flash_short_defined, ((B, 70, H, D), K, K), learned=((H,),)
    ),
    "flash_attn_varlen_func": Door(flash_varlen, flash_varlen_defined, tuple(x[1:] for x in QKV)),
    "flash_attn_qkvpacked_func": Door(flash_packed, flash_packed_defined, ((B, N, 3, H, D),)),
    "flash_attn_with_kvcache": Door(
        cached(0), cached_defined, ((B, 3, H, D), K, K, (B, 3, HKV, D), (B, 3, HKV, D)), gradients=False
    ),
    "flash_attn_with_kvcache in pages": Door(
        cached(20), cached_defined, ((B, 3, H, D), K, K, (B, 3, HKV, D), (B, 3, HKV, D)), gradients=False
    ),
    "flash_attn_with_kvcache with rotary positions": Door(
        rotary, rotary_defined, ((B, 3, H, D), K, K, (B, 3, HKV, D), (B, 3, HKV, D)), gradients=False
    ),
    "flex_attention": Door(flex(create_block_mask), flex_defined, HEADS),
    "flex_attention of PyTorch's mask": Door(flex(theirs.create_block_mask), flex_defined, HEADS),
    "flex_attention, a learned table": Door(flex_learned, flex_learned_defined, HEADS, learned=((H, 8),)),
    "flex_attention, products of rows": Door(
        flex_products, flex_products_defined, (*HEADS, (B, H, N, 8), (B, 1, N, 8))
    ),
    "na1d": na(1, (N,), kernel_size=31, dilation=3, is_causal=True),
    "na2d": Door(
        na2d, na2d_defined,
        ((B, 15, 20, H, D), (B, 15, 20, HKV, D), (B, 15, 20, HKV, D), (B, 9, HKV, D), (B, 9, HKV, D)),
    ),
    "na3d": na(3, (5, 6, 10), kernel_size=3, stride=2),
    "xformers, blocks": Door(blocks, blocks_defined, SAME_HEADS),
    "xformers, a tensor": Door(added, added_defined, (*SAME_HEADS, (B, H, N, N))),
    "FastVideo": Door(video, video_defined, ((B, H, 320, D),) * 3),
    "sdpa, is_causal": Door(ours(is_causal=True), torch_defined(is_causal=True), HEADS),
    "sdpa, keys of one batch element and head": Door(
        ours(is_causal=True), torch_defined(is_causal=True), ((B, H, N, D), (1, 1, N, D), (1, 1, N, D))
    ),
    "sdpa, a learned mask": Door(ours(), torch_defined(), (*HEADS, (1, H, N, N))),
    **{
        f"{door}, pages of {page}, {new} new": engine(door, page, new)
        for door in ("vllm", "sglang") for page, new in ((1, (1, 1)), (20, (1, 1)), (20, (3, 3)), (20, (7, 20)))
    },
    "sglang decode_attention": engine("decode", 20, (1, 1)),
    "selected_attention, by place": Door(chosen_by_place, chosen_by_place_defined, HEADS, learned=((H,), (H,))),
    "selected_attention, packed": Door(chosen, chosen_defined, HEADS, learned=((H,), (H,))),
}  # fmt: skip


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("name", DOORS)
def test_a_door_is_its_definition_in_bf16(name, device):
    door = DOORS[name]
    got = door.results(door.call, 0, torch.bfloat16, device)
    truth = door.results(door.definition, 0, torch.float64, "cpu")

    def draws():
        # Few values in a decoding step, or one number a head: a plain result may be exact by luck.
        queries = truth["out"].numel() // truth["out"].shape[-1]
        for seed in range(draws_for(queries, queries * N, learned=bool(door.learned))):
            plain = door.results(door.definition, seed, torch.bfloat16, "cpu")
            yield plain, truth if seed == 0 else door.results(door.definition, seed, torch.float64, "cpu")

    found = compare_with_draws(got, truth, draws(), 1.0, enough=1.0)
    assert found.exact, f"every error must be at most what is allowed; got\n{found}"


def test_definitions_are_those_of_the_other_tests():
    q, k, v = (x.double() for x in DOORS["flash_attn_func"].drawn(0, torch.float64, "cpu"))
    out, lse = flash_defined(q, k, v)
    live = live_scores(N, N, True, (90, 0))
    want, want_lse = defined(q[1], k[1], v[1], live, softcap=5.0, slopes=SLOPES)
    torch.testing.assert_close(out[1], want)
    torch.testing.assert_close(lse[1], want_lse)
