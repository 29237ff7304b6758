"""Every call with every feature: each cell of the matrix in docs/calls.py is exact, or is refused with its sentence."""

import re
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from docs.calls import CALLS, FEATURES, NOTHING, REFUSED, SCORES
from sparseflash import BlockMask, attention, attention_varlen, distributed, masks, scores, sdpa, varlen
from sparseflash.decode import attention_with_cache
from sparseflash.dropout import amplification, keep_mask, seed_tensor, threshold
from sparseflash.grouped import selected_attention
from sparseflash.huggingface.layer import Attention
from sparseflash.huggingface.model_mask import mask_of_forward
from sparseflash.nn import MultiheadAttention, SparseSelfAttention
from sparseflash.selected_tokens import token_attention
from sparseflash.selection import MixtureOfBlocks
from tests.watched.waiting import assert_replays_as_called

BATCH, HEADS, TOKENS, DIM, BLOCK = 2, 4, 20, 16, 16
DROPPED = 0.25
CAUSAL = partial(masks.causal, block=BLOCK)


def own(score, b, h, q, k, gain):
    return score * gain[h] + torch.sin(0.3 * q - 0.2 * k + b)


def window(q, k, h):
    return (k <= q) & (q - k < 3 + h)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape)), dtype=torch.float64)


@dataclass(frozen=True)
class Problem:
    feature: str
    device: str = "cpu"
    dtype: torch.dtype = torch.float64

    @property
    def kv_heads(self):
        return 2 if self.feature == "grouped heads" else HEADS

    @property
    def v_dim(self):
        return 20 if self.feature == "Dv" else DIM

    def leaves(self):
        shapes = [(HEADS, DIM), (self.kv_heads, DIM), (self.kv_heads, self.v_dim)]
        found = [drawn(BATCH, heads, TOKENS, dim, seed=n) for n, (heads, dim) in enumerate(shapes)]
        learned = {
            "temperature": lambda: drawn(HEADS).abs() + 0.5,
            "alibi": lambda: drawn(HEADS),
            "log_decay": lambda: drawn(HEADS),
            "relative": lambda: drawn(HEADS, 8),
            "key_bias": lambda: drawn(BATCH, 1, TOKENS),
            "bias": lambda: drawn(BATCH, HEADS, TOKENS, TOKENS),
            "tile_bias": lambda: drawn(1, HEADS, TOKENS, TOKENS),
            "function": lambda: drawn(HEADS),
            "sink": lambda: drawn(HEADS),
        }.get(self.feature)
        return [x.to(self.device, self.dtype).requires_grad_() for x in (*found, *([learned()] if learned else []))]

    def lengths(self):
        return [TOKENS, 13] if self.feature == "lengths" else [TOKENS] * BATCH

    def pattern(self, length=TOKENS):
        if self.feature in ("mask", "mask by head"):
            heads = range(HEADS) if self.feature == "mask by head" else [0]
            return masks.per_head([BlockMask.from_function(partial(window, h=h), length, block=BLOCK) for h in heads])
        return CAUSAL(length)

    def mask(self):
        if self.feature == "mask by batch":
            made = BlockMask.from_dense(self.live(), block=BLOCK)
        else:
            made = self.pattern()
        return (made.with_lengths(self.lengths()) if self.feature == "lengths" else made).to(self.device)

    def live(self):
        q, k = torch.arange(TOKENS).view(-1, 1), torch.arange(TOKENS)
        live = (k <= q).expand(BATCH, HEADS, TOKENS, TOKENS).clone()
        for b in range(BATCH):
            for h in range(HEADS):
                if self.feature in ("mask", "mask by head"):
                    live[b, h] = window(q, k, h if self.feature == "mask by head" else 0)
                if self.feature == "mask by batch":
                    live[b, h] = window(q, k, 4 * b)
            live[b, :, self.lengths()[b] :] = live[b, :, :, self.lengths()[b] :] = False
        return live.to(self.device)

    def changes(self, learned, mask=None, *, packed=False):
        (x,) = learned or (None,)
        if self.feature == "tile_bias":
            places = (lambda q, k: x[:, :, q % TOKENS, k % TOKENS]) if packed else (lambda q, k: x[:, :, q, k])
            return scores.tile_bias(scores.tile_values(places, mask), mask)
        if packed and self.feature == "key_bias":
            x = x.transpose(0, 1).reshape(1, 1, -1)
        if packed and self.feature == "bias":
            x = torch.stack([torch.block_diag(*each) for each in x.transpose(0, 1)])[None]
        return {
            "softcap": lambda: scores.softcap(1.5),
            "relative": lambda: scores.relative(x, scores.t5_buckets(8, 20)),
            "function": lambda: scores.function(own, x),
        }.get(self.feature, lambda: getattr(scores, self.feature)(x))()

    def truth(self, leaves, keep=None):
        q, k, v, *learned = leaves
        k, v = (x.repeat_interleave(HEADS // self.kv_heads, 1) for x in (k, v))
        s, place = q @ k.mT / DIM**0.5, torch.arange(TOKENS, device=q.device)
        far = (place.view(-1, 1) - place).abs()
        of_head = [x.view(-1, 1, 1) for x in learned if x.ndim == 1]
        s = {
            "softcap": lambda: 1.5 * torch.tanh(s / 1.5),
            "temperature": lambda: s / of_head[0],
            "alibi": lambda: s - of_head[0] * far,
            "log_decay": lambda: s - of_head[0] * far.double().log1p(),
            "relative": lambda: s + learned[0][:, scores.t5_buckets(8, 20)(place - place.view(-1, 1))],
            "key_bias": lambda: s + learned[0][:, :, None],
            "bias": lambda: s + learned[0],
            "tile_bias": lambda: s + learned[0],
            "function": lambda: (
                s * of_head[0]
                + torch.sin(0.3 * place.view(-1, 1) - 0.2 * place + torch.arange(BATCH).view(-1, 1, 1, 1).to(q.device))
            ),
        }.get(self.feature, lambda: s)()
        s = s.masked_fill(~self.live(), -torch.inf)
        if self.feature == "sink":
            s = torch.cat([s, of_head[0].expand(BATCH, HEADS, TOKENS, 1)], -1)
        weights = s.softmax(-1).nan_to_num(0.0)[..., :TOKENS]
        if keep is not None:
            weights = weights * keep * amplification(threshold(DROPPED))
        return weights @ v, s.logsumexp(-1)

    @property
    def options(self):
        found = {"dropout_p": DROPPED} if self.feature == "dropout" else {}
        return found | ({"return_lse": True} if self.feature == "return_lse" else {})

    def scored(self, learned, *more, **how):
        return {"scores": self.changes(learned, *more, **how)} if self.feature in SCORES else {}


# Each takes a problem and returns the function of its leaves that returns out, or out and lse; masks and layers are
# made outside of it.


def by_attention(p):
    mask = p.mask()
    return lambda q, k, v, *learned: attention(q, k, v, mask, **p.options, **p.scored(learned, mask))


def by_varlen(p):
    packed, whole, sums = packing(p)
    more = {"mask": p.mask()} if p.feature == "mask by batch" else {"pattern": p.pattern}
    mask = varlen.varlen_mask(sums, pattern=p.pattern, device=p.device)

    def run(q, k, v, *learned):
        tokens_first = [x[0].transpose(0, 1) for x in packed(q, k, v)]
        found = attention_varlen(*tokens_first, sums, **more, **p.options, **p.scored(learned, mask, packed=True))
        out, lse = found if isinstance(found, tuple) else (found, None)
        out = whole(out.transpose(0, 1)[None])
        return out if lse is None else (out, whole(lse[None]))

    return run


def by_cache(p):
    lengths, more, mask = torch.tensor(p.lengths(), device=p.device), dict(p.options), p.mask()
    if p.feature.startswith("mask"):
        more["mask"] = mask.reblock(32)

    def run(*tensors):
        with_gradients = p.feature in ("gradients", "checkpoint")
        q, k, v, *learned = tensors if with_gradients else [x.detach() for x in tensors]
        if p.feature == "lengths":
            q = torch.stack([x.roll(TOKENS - n, 1) for x, n in zip(q, p.lengths())])
        found = attention_with_cache(q, k, v, lengths, **more, **p.scored(learned, mask))
        if p.feature == "lengths":
            found = torch.stack([x.roll(n - TOKENS, 1) for x, n in zip(found, p.lengths())])
        return found

    return run


def by_selected(p):
    more = p.options | ({"mask": p.mask()} if p.feature.startswith("mask") else {})
    index = torch.tensor([0, 1], device=p.device).expand(BATCH, p.kv_heads, TOKENS, 2)
    mask = p.mask()
    if p.feature != "lengths":
        return lambda q, k, v, *x: selected_attention(q, k, v, index, span=16, **more, **p.scored(x, mask))
    packed, whole, sums = packing(p)
    index = index[:1, :, :1].expand(1, -1, sums[-1], 2)
    return lambda *x: whole(selected_attention(*packed(*x), index, span=16, cu_seqlens=sums))


def packing(p):
    lengths = p.lengths()
    sums = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    places = torch.cat([TOKENS * b + torch.arange(n) for b, n in enumerate(lengths)]).to(p.device)

    def packed(*tensors):
        return [torch.cat([each[:, :n] for each, n in zip(x, lengths)], 1)[None] for x in tensors]

    def whole(x):
        found = x.new_zeros(x.shape[1], BATCH * TOKENS, *x.shape[3:]).index_copy(1, places, x[0])
        return found.unflatten(1, (BATCH, TOKENS)).transpose(0, 1)

    return packed, whole, sums


def by_tokens(p):
    more = p.options | ({"scores": scores.softcap(1.0)} if p.feature in SCORES else {})
    more |= {"mask": p.mask()} if p.feature.startswith("mask") else {}
    more |= {"lengths": p.lengths()} if p.feature == "lengths" else {}
    index = torch.arange(TOKENS, device=p.device).expand(p.kv_heads, TOKENS, TOKENS)
    return lambda q, k, v, *_: token_attention(q, k, v, index, **more)


def by_layer(p):
    dropped, features = DROPPED if p.feature == "dropout" else 0.0, (HEADS + 2 * p.kv_heads) * DIM
    mask = p.pattern() if p.feature != "mask by batch" else p.mask()
    layer = SparseSelfAttention(
        features, HEADS, mask, kv_heads=p.kv_heads, head_dim=DIM, dropout=dropped, dtype=p.dtype, device=p.device
    )
    layer.qkv, layer.out = torch.nn.Identity(), torch.nn.Identity()
    more = {"lengths": p.lengths()} if p.feature == "lengths" else p.options
    more.pop("dropout_p", None)
    mask = layer.mask(TOKENS, TOKENS, torch.device(p.device))

    def run(q, k, v, *learned):
        x = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], -1)
        return layer(x, **more, **p.scored(learned, mask)).unflatten(2, (HEADS, DIM)).transpose(1, 2)

    return run


def by_selection(p):
    """A layer whose queries choose both blocks of the sequence."""
    features = (HEADS + 2 * p.kv_heads) * DIM
    layer = MixtureOfBlocks(
        features, HEADS, p.kv_heads, block=16, chosen=2, head_dim=DIM, dtype=p.dtype, device=p.device
    )
    layer.qkv, layer.out = torch.nn.Identity(), torch.nn.Identity()
    more = p.options | ({"scores": scores.softcap(1.0)} if p.feature in SCORES else {})
    more |= {"mask": p.mask()} if p.feature.startswith("mask") else {}
    packed, whole, sums = packing(p)

    def run(q, k, v, *_):
        if p.feature == "lengths":
            x = torch.cat([x.transpose(1, 2).flatten(2) for x in packed(q, k, v)], -1)
            return whole(layer(x, cu_seqlens=sums).unflatten(2, (HEADS, DIM)).transpose(1, 2))
        x = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], -1)
        return layer(x, **more).unflatten(2, (HEADS, DIM)).transpose(1, 2)

    return run


def by_multihead(p):
    dropped, features = DROPPED if p.feature == "dropout" else 0.0, HEADS * DIM
    layer = MultiheadAttention(
        features, HEADS, dropped, bias=False, batch_first=True, dtype=p.dtype, device=p.device,
        mask=p.mask() if p.feature == "mask by batch" else p.pattern(),
    )  # fmt: skip
    with torch.no_grad():
        eye = torch.eye(features, dtype=p.dtype, device=p.device)
        layer.in_proj_weight.copy_(torch.cat([eye] * 3))
        layer.out_proj.weight.copy_(eye)
    padding = torch.arange(TOKENS) >= torch.tensor(p.lengths()).view(-1, 1)

    def run(q, k, v, *learned):
        more = p.options
        more.pop("dropout_p", None)
        if p.feature == "lengths":
            more["key_padding_mask"] = padding.to(p.device)
        if p.feature == "bias":
            more["attn_mask"] = learned[0].flatten(0, 1)
        elif p.feature in SCORES:
            more["scores"] = scores.softcap(1.0)
        out, _ = layer(*(x.transpose(1, 2).flatten(2) for x in (q, k, v)), **more)
        out = out.unflatten(2, (HEADS, DIM)).transpose(1, 2)
        return out.masked_fill(padding[:, None, :, None].to(p.device), 0.0) if p.feature == "lengths" else out

    return run


def by_sdpa(p):
    mask, more = p.mask(), p.options | {"enable_gqa": p.feature == "grouped heads"}
    if p.feature in SCORES and p.feature != "bias":
        more["scores"] = scores.softcap(1.0)

    def run(q, k, v, *learned):
        return sdpa(q, k, v, learned[0].masked_fill(~p.live(), -torch.inf) if p.feature == "bias" else mask, **more)

    return run


def by_transformers(p):
    attends = Attention(p.mask(), BLOCK)

    def run(q, k, v, *learned):
        if p.feature == "export":
            mask_of_forward(BATCH, TOKENS, TOKENS, mask_function=lambda b, h, q, k: k <= q, block=BLOCK)
        more = {
            "softcap": lambda: {"softcap": 1.5},
            "sink": lambda: {"s_aux": learned[0]},
            "bias": lambda: {"position_bias": learned[0]},
            "dropout": lambda: {"dropout": DROPPED},
        }.get(p.feature, dict)()
        return attends(torch.nn.Module(), q, k, v, None, is_causal=False, **more)[0].transpose(1, 2)

    return run


def by_distributed(p):
    mask = p.mask()
    plan = distributed.shard(mask, transport="collective")

    def run(q, k, v, *learned):
        return distributed.attention(q, k, v, plan, **p.options, **p.scored(learned, mask))

    return run


BY = {
    "attention": by_attention, "varlen": by_varlen, "cache": by_cache, "selected": by_selected, "tokens": by_tokens,
    "layer": by_layer, "selection": by_selection, "multihead": by_multihead, "sdpa": by_sdpa,
    "transformers": by_transformers, "distributed": by_distributed,
}  # fmt: skip
CELLS = [(call, feature) for call in CALLS for feature in FEATURES if (call, feature) not in NOTHING]


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_call_has_a_function_and_every_refusal_a_cell():
    assert [*BY] == [*CALLS]
    assert all(call in CALLS and feature in FEATURES for call, feature in (*REFUSED, *NOTHING))
    assert not REFUSED.keys() & NOTHING.keys()


@pytest.mark.parametrize(("call", "feature"), [cell for cell in CELLS if cell[1] != "record"], ids=str)
def test_a_cell_is_exact_or_refused(call, feature):
    p = Problem(feature)
    leaves = p.leaves()
    run = BY[call](p)
    if feature == "compile":
        run = torch.compile(run, backend="eager")
    elif feature == "export":
        run = exported(run, leaves)
    elif feature == "checkpoint":
        run = partial(checkpoint, run, use_reentrant=False)
    torch.manual_seed(3)
    if (call, feature) in REFUSED:
        with pytest.raises(
            (ValueError, TypeError, NotImplementedError), match=f"^{re.escape(REFUSED[call, feature])}$"
        ):
            run(*leaves)
        return
    found = run(*leaves)
    found = found if isinstance(found, tuple) else (found,)
    assert len(found) == 1 + (feature == "return_lse")
    truth = p.truth(leaves, kept(call) if feature == "dropout" else None)[: len(found)]
    gradients = [torch.randn_like(x) for x in found]
    asked = [] if call == "cache" else leaves
    compared = [*zip(found, truth)]
    if asked:
        compared += zip(*(torch.autograd.grad(results, asked, gradients) for results in (found, truth)))
    for mine, theirs in compared:
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def kept(call):
    torch.manual_seed(3)
    seed = seed_tensor(None, torch.device("cpu"))
    torch.manual_seed(3)
    if call == "selected":
        return keep_mask(seed, DROPPED, BATCH, HEADS, 16 * TOKENS, TOKENS)[:, :, ::16]
    if call != "varlen":
        return keep_mask(seed, DROPPED, BATCH, HEADS, TOKENS, TOKENS)
    whole = keep_mask(seed, DROPPED, 1, HEADS, BATCH * TOKENS, BATCH * TOKENS)[0]
    return torch.stack([whole[:, n : n + TOKENS, n : n + TOKENS] for n in range(0, BATCH * TOKENS, TOKENS)])


def exported(run, leaves):
    class Module(torch.nn.Module):
        def forward(self, *tensors):
            return run(*tensors)

    def call(*given):
        return torch.export.export(Module(), tuple(given), strict=False).module()(*given)

    return call


@pytest.mark.gpu
@pytest.mark.parametrize("call", [call for call, feature in CELLS if feature == "record"])
def test_a_cuda_graph_records_every_call(call):
    p = Problem("record", "cuda", torch.float16)
    leaves = [x.detach() for x in p.leaves()]
    run = BY[call](p)

    def another(seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        for x in leaves:
            x.copy_(torch.randn(x.shape, generator=generator, device="cuda"))

    with torch.no_grad():
        assert_replays_as_called(lambda: [run(*leaves)], another, range(3))
