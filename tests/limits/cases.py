"""Cases near numeric limits: positions past 2^24, strides near 2^31 and tensors of more than 2^31 elements.

Some whole rows and columns are compared with fp64, with the tolerance of the exactness tests. Tiny sizes test this code
on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseflash import BlockMask, attention, decode, masks, scores
from sparseflash.scores.change import Sizes, scores_of
from sparseflash.testing.yardstick import error_of, largest_error
from tests.compared.exactness import plain_attention

Added = Callable[[int, Tensor, Tensor], Tensor]  # (head, queries [n, 1], keys [m]) -> change of scores, fp64 [n, m]


class Sample(NamedTuple):
    """Rows of a head and all keys that they see. The last `complete` keys are seen by no other rows."""

    batch: int
    head: int
    rows: slice
    keys: slice
    complete: int = 0


@dataclass
class Case:
    q: Tensor
    k: Tensor
    v: Tensor
    samples: list[Sample]
    mask: BlockMask | None = None
    live: Callable[[Tensor, Tensor], Tensor] | None = None  # (queries [n, 1], keys [m]) -> live; None: all are
    change: scores.Change | None = None
    added: Added | None = None
    learned: Tensor | None = None  # a bias of pairs, compared in the rows of the samples
    dout: Tensor | None = None  # None: no gradients
    decoded: dict[str, Tensor] = field(default_factory=dict)  # of a decoding step
    cache: tuple[Tensor, Tensor] | None = None  # what `k` and `v` are views of


@dataclass(frozen=True)
class Scale:
    device: torch.device
    tiny: bool

    def of(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    @property
    def dtype(self) -> torch.dtype:
        """bf16; fp16 in Triton's interpreter, which has no bf16."""
        return torch.float16 if self.device.type == "cpu" else torch.bfloat16

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device).requires_grad_()


def _far(at: Scale, change: Callable[[Tensor], scores.Change], added: Callable[[Tensor, int, Tensor], Tensor]) -> Case:
    """Few queries at the end of 16.9 million keys, each with a window."""
    keys, queries, window, dim = at.of(16_905_216, 400), at.of(24, 20), at.of(128, 40), at.of(64, 16)
    q, k, v = at.randn(1, 2, queries, dim), at.randn(1, 2, keys, dim), at.randn(1, 2, keys, dim)
    slopes = torch.tensor([0.5, 2.0**-5], device=at.device)

    def added_at(head: int, rows: Tensor, columns: Tensor) -> Tensor:
        return added(slopes.double(), head, (rows + (keys - queries) - columns).abs().double())

    return Case(
        q, k, v, [Sample(0, head, slice(0, queries), slice(keys - 2 * window, keys), window) for head in (0, 1)],
        masks.local(queries, keys, window=window, causal=True, block=at.of(64, 16)).to(at.device),
        _window(keys - queries, window), change(slopes), added_at, dout=torch.randn_like(q),
    )  # fmt: skip


def _window(shift: int, window: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda q, k: (k <= q + shift) & (k > q + shift - window)


def _alibi(at: Scale) -> Case:
    return _far(at, scores.alibi, lambda slopes, head, apart: -slopes[head] * apart)


def _log_decay(at: Scale) -> Case:
    return _far(at, scores.log_decay, lambda slopes, head, apart: -slopes[head] * apart.log1p())


def _table(at: Scale) -> Case:
    table = torch.linspace(-2, 2, 2 * 33, device=at.device).view(2, 33)
    bucket = scores.clipped(16)
    return _far(
        at, lambda slopes: scores.relative(table, bucket),
        lambda slopes, head, apart: table.double()[head, bucket(-apart.long())],
    )  # fmt: skip


def _function(at: Scale) -> Case:
    shift = at.of(16_905_216 - 24, 400 - 20)
    return _far(
        at, lambda slopes: scores.function(lambda s, b, h, q, k, slope: s - slope[h] * (q + shift - k).abs(), slopes),
        lambda slopes, head, apart: -slopes[head] * apart,
    )  # fmt: skip


def _alibi_of_all(at: Scale) -> Case:
    """Queries that see all of 16.9 million keys."""
    keys, dim = at.of(16_905_216, 300), at.of(64, 16)
    q, k, v = at.randn(1, 2, 4, dim), at.randn(1, 2, keys, dim), at.randn(1, 2, keys, dim)
    slopes = torch.tensor([2.0**-20, 2.0**-23], device=at.device)
    samples = [Sample(0, head, slice(0, 4), slice(0, keys)) for head in (0, 1)]
    return Case(
        q, k, v, samples, change=scores.alibi(slopes),
        added=lambda head, rows, columns: -slopes[head].double() * (rows + (keys - 4) - columns).abs(),
    )  # fmt: skip


def _out_of_far_tokens(at: Scale) -> Case:
    """Tokens before heads: out would have a token stride of 16.9 million, and dout has."""
    heads, tokens, dim, v_dim = at.of(66_100, 3), at.of(128, 40), at.of(64, 16), at.of(256, 32)
    q = at.randn(1, tokens, heads, dim).transpose(1, 2)
    k, v = at.randn(1, 1, tokens, dim), at.randn(1, 1, tokens, v_dim)
    dout = torch.randn(1, tokens, heads, v_dim, dtype=at.dtype, device=at.device).transpose(1, 2)
    whole = slice(0, tokens)
    return Case(q, k, v, [Sample(0, head, whole, whole) for head in (0, heads // 2, heads - 1)], dout=dout)


def _expanded_keys(at: Scale) -> Case:
    tokens, batch, heads, dim = at.of(128, 40), at.of(2_100, 2), at.of(64, 3), at.of(128, 16)
    q = at.randn(batch, heads, tokens, dim)
    k, v = (at.randn(tokens, batch, 1, dim).permute(1, 2, 0, 3).expand(batch, heads, tokens, dim) for _ in "kv")
    whole = slice(0, tokens)
    samples = [Sample(b, h, whole, whole, tokens) for b, h in ((0, 0), (batch // 2, 1), (batch - 1, heads - 1))]
    return Case(q, k, v, samples, dout=torch.randn_like(q))


def _bias_of_many_keys(at: Scale) -> Case:
    keys, queries, window, dim = at.of(17_000_000, 400), at.of(144, 40), at.of(128, 30), at.of(64, 16)
    q, k, v = at.randn(1, 1, queries, dim), at.randn(1, 1, keys, dim), at.randn(1, 1, keys, dim)
    values = at.randn(1, 1, queries, keys)
    seen = slice(keys - queries - window, keys)
    return Case(
        q, k, v, [Sample(0, 0, slice(0, queries), seen, queries)],
        masks.local(queries, keys, window=window, causal=True, block=at.of(128, 16)).to(at.device),
        _window(keys - queries, window), scores.bias(values), _of_bias(values), values, torch.randn_like(q),
    )  # fmt: skip


def _of_bias(values: Tensor) -> Added:
    return lambda head, rows, columns: values.detach()[0, head, rows, columns].double()


def _large_bias(at: Scale) -> Case:
    heads, tokens, dim = at.of(8, 2), at.of(17_000, 40), at.of(64, 16)
    q, k, v, values = *(at.randn(1, heads, tokens, dim) for _ in "qkv"), at.randn(1, heads, tokens, tokens)
    few = at.of(64, 40)
    samples = [Sample(0, head, slice(tokens - few, tokens), slice(0, tokens)) for head in (0, heads - 1)]
    return Case(q, k, v, samples, None, None, scores.bias(values), _of_bias(values), values, torch.randn_like(q))


def _large_tensors(at: Scale) -> Case:
    batch, heads, tokens, dim, window = at.of(2, 1), at.of(128, 2), at.of(66_048, 80), at.of(128, 16), at.of(256, 30)
    q, k, v = (at.randn(batch, heads, tokens, dim) for _ in "qkv")
    last, seen = slice(tokens - window, tokens), slice(tokens - 2 * window, tokens)
    samples = [Sample(b, h, last, seen, window) for b, h in ((0, 0), (batch - 1, heads - 1))]
    mask = masks.local(tokens, window=window, causal=True, block=at.of(128, 16)).to(at.device)
    return Case(q, k, v, samples, mask, _window(0, window), dout=torch.randn_like(q))


def _large_cache(at: Scale) -> Case:
    batch, kv_heads, room, dim = at.of(8, 2), at.of(8, 2), at.of(525_000, 100), at.of(64, 16)
    q = torch.randn(batch, 2 * kv_heads, 1, dim, dtype=at.dtype, device=at.device)
    k, v = (torch.randn(batch, kv_heads, room, dim, dtype=at.dtype, device=at.device) for _ in "kv")
    given = {"lengths": torch.full((batch,), room, device=at.device)}
    return Case(q, k, v, _steps(batch, 2 * kv_heads, room), decoded=given)


def _steps(batch: int, heads: int, room: int) -> list[Sample]:
    return [Sample(b, h, slice(0, 1), slice(0, room)) for b, h in ((0, 0), (batch - 1, heads - 1))]


def _large_pages(at: Scale) -> Case:
    batch, heads, pages, page, dim = at.of(8, 2), at.of(8, 2), at.of(8_250, 7), at.of(64, 16), at.of(64, 16)
    q = torch.randn(batch, heads, 1, dim, dtype=at.dtype, device=at.device)
    shape = batch * pages, heads, page, dim
    k, v = (torch.randn(shape, dtype=at.dtype, device=at.device) for _ in "kv")
    table = torch.randperm(batch * pages, device=at.device).view(batch, pages)
    given = {"lengths": torch.full((batch,), pages * page, device=at.device), "block_table": table}
    return Case(q, k, v, _steps(batch, heads, pages * page), decoded=given)


CASES: dict[str, tuple[Callable[[Scale], Case], tuple[str, ...]]] = {  # the backends that run it
    "alibi, 16.9M keys": (_alibi, ("triton",)),
    "log decay, 16.9M keys": (_log_decay, ("triton",)),
    "table, 16.9M keys": (_table, ("triton",)),
    "function of q - k, 16.9M keys": (_function, ("triton",)),
    "alibi, all of 16.9M keys": (_alibi_of_all, ("triton",)),
    "out of far tokens": (_out_of_far_tokens, ("triton",)),
    "keys expanded to many heads": (_expanded_keys, ("triton", "hopper")),
    "bias of 17M keys": (_bias_of_many_keys, ("triton", "hopper")),
    "bias of 2^31 elements": (_large_bias, ("triton", "hopper")),
    "tensors of 2^31 elements": (_large_tensors, ("triton", "hopper")),
    "cache of 2^31 elements": (_large_cache, ("triton",)),
    "pages of 2^31 elements": (_large_pages, ("triton",)),
}


def compared(name: str, backend: str, at: Scale, seed: int = 0) -> Iterator[dict[str, Any]]:
    torch.manual_seed(seed)
    case = CASES[name][0](at)
    found, truths, plain_errors = _results(case, backend), [], dict[str, float]()
    for sample in case.samples:
        truth, plain = (_by_definition(case, sample, dtype) for dtype in (torch.float64, at.dtype))
        truths.append(truth)
        for result, value in plain.items():
            plain_errors[result] = max(plain_errors.get(result, 0.0), largest_error(value, truth[result]))
    for result, plain_error in plain_errors.items():
        errors = [
            error_of(_taken(found[result], result, case, sample), truth[result], plain_error)
            for sample, truth in zip(case.samples, truths, strict=True)
        ]
        worst = max(errors, key=lambda each: each.ratio)
        yield {"result": result, "error": worst.largest, "allowed": worst.allowed, "ratio": worst.ratio}


def _results(case: Case, backend: str) -> dict[str, Tensor]:
    if case.decoded:
        out, lse = decode.attention_with_cache(case.q, case.k, case.v, **case.decoded, backend=backend, return_lse=True)
        return {"out": out, "lse": lse}
    with torch.set_grad_enabled(case.dout is not None):
        out, lse = attention(
            case.q, case.k, case.v, case.mask, scores=case.change, backend=backend, return_lse=True
        )  # fmt: skip
    found = {"out": out.detach(), "lse": lse.detach()}
    if case.dout is not None:
        wanted = {"dq": case.q, "dk": case.k, "dv": case.v}
        if case.learned is not None:
            wanted["dbias"] = case.learned
        found |= dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), case.dout), strict=True))
    return found


def _keys(case: Case, sample: Sample) -> tuple[Tensor, Tensor]:
    batch, head = sample.batch, sample.head // (case.q.shape[1] // case.k.shape[1])
    if (table := case.decoded.get("block_table")) is not None:
        return tuple(x[table[batch], head].flatten(0, 1)[None, None, sample.keys] for x in (case.k, case.v))
    return tuple(x.detach()[batch : batch + 1, head : head + 1, sample.keys] for x in (case.k, case.v))


def _by_definition(case: Case, sample: Sample, dtype: torch.dtype) -> dict[str, Tensor]:
    here = slice(sample.batch, sample.batch + 1), slice(sample.head, sample.head + 1), sample.rows
    q, k, v = (x.to(dtype) for x in (case.q.detach()[here], *_keys(case, sample)))
    given = [x.requires_grad_() for x in (q, k, v)]
    rows, keys = (torch.arange(each.start, each.stop, device=q.device) for each in (sample.rows, sample.keys))
    mask, changes = None, None
    if case.live is not None:
        mask = BlockMask.from_dense(case.live(rows[:, None], keys).cpu(), block=16).to(q.device)
    if case.added is not None:
        added = case.added(sample.head, rows[:, None], keys).to(torch.promote_types(dtype, torch.float32))
        values = added[None, None].requires_grad_()
        changes = scores_of(scores.bias(values)).prepared(Sizes(1, 1, len(rows), len(keys), q.device, mask))
        given.append(values)
    with torch.set_grad_enabled(case.dout is not None):
        out, lse = plain_attention(*given[:3], mask, q.shape[-1] ** -0.5, changes=changes)
    found = {"out": out.detach(), "lse": lse.detach()}
    if case.dout is None:
        return found
    gradients = torch.autograd.grad(out, given, case.dout[here].to(dtype))
    found["dq"] = gradients[0]
    if sample.complete:
        found["dk"], found["dv"] = (x[:, :, -sample.complete :] for x in gradients[1:3])
    if case.learned is not None:
        found["dbias"] = gradients[3]
    return found


def _taken(found: Tensor, result: str, case: Case, sample: Sample) -> Tensor:
    found = found[sample.batch : sample.batch + 1, sample.head : sample.head + 1]
    if result in ("dk", "dv"):
        return found[:, :, sample.keys][:, :, -sample.complete :]
    if result == "dbias":
        return found[:, :, sample.rows, sample.keys]
    return found[:, :, sample.rows]
