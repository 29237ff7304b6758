"""`attention_varlen`: attention within each of several sequences that lie one behind the other, without padding."""

from __future__ import annotations

from functools import partial
from itertools import count, pairwise
from types import FunctionType
from typing import Any, Literal, overload

import torch
from torch import Tensor

from sparseflash.attention import Backend, attention
from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import Block, block_pair, checked_device, plain_tensor
from sparseflash.blockmask.cache import BoundedDict, once
from sparseflash.blockmask.compiling import contents_when_faking
from sparseflash.blockmask.ops.place import place
from sparseflash.blockmask.ops.stack import stack_heads
from sparseflash.blockmask.running_sums import running_sums
from sparseflash.captured import Captured
from sparseflash.masks.causal import causal
from sparseflash.masks.chunked import chunked
from sparseflash.masks.dense import dense
from sparseflash.masks.documents import documents
from sparseflash.masks.local import local
from sparseflash.masks.streaming import a_shape, streaming
from sparseflash.packed_pattern import FEW_LENGTHS, NESTED, OF_ONE_LENGTH, asked_for, packed_runs
from sparseflash.pattern import Pattern, check_pattern, is_rule, made_for
from sparseflash.remedies import refuse, without_others
from sparseflash.scores.change import Change, Scores, scores_of
from sparseflash.scores.packed import packed

_masks = BoundedDict(32)
_versions = BoundedDict(32)
_numbers = count(1)


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    pattern: Pattern | None = None, *, block: Block = 128, scale: float | None = None,
    return_lse: Literal[False] = False, dropout_p: float = 0.0, seed: int | Tensor | None = None,
    scores: Scores | Change | None = None, backend: Backend | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    pattern: Pattern | None = None, *, block: Block = 128, scale: float | None = None,
    return_lse: Literal[True], dropout_p: float = 0.0, seed: int | Tensor | None = None,
    scores: Scores | Change | None = None, backend: Backend | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    pattern: Pattern | None = None,
    *,
    block: Block = 128,
    scale: float | None = None,
    return_lse: bool = False,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    scores: Scores | Change | None = None,
    backend: Backend | None = None,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention within each of several packed sequences, over the live scores of each sequence's mask.

    >>> from sparseflash import masks
    >>> q, k, v = torch.randn(3, 300, 2, 16)  # 300 tokens, 2 heads
    >>> cu_seqlens = torch.tensor([0, 100, 250, 300])  # of three sequences
    >>> attention_varlen(q, k, v, cu_seqlens, pattern=masks.causal).shape
    torch.Size([300, 2, 16])

    Any function of a length is a pattern, and so is a rule for the positions of a query and a key:

    >>> from functools import partial
    >>> near = partial(masks.local, window=32, causal=True)
    >>> out = attention_varlen(q, k, v, cu_seqlens, pattern=near)
    >>> same = attention_varlen(q, k, v, cu_seqlens, pattern=lambda q, k: (k <= q) & (q - k < 32))
    >>> torch.equal(out, same)
    True

    Nested tensors (`layout=torch.jagged`) hold the running sums themselves:

    >>> x = torch.nested.nested_tensor([torch.randn(n, 2, 16) for n in (5, 9)], layout=torch.jagged)
    >>> [sequence.shape[0] for sequence in attention_varlen(x, x, x, pattern=masks.causal).unbind()]
    [5, 9]

    Args:
        q: queries of all sequences, `[total_q, Hq, D]`, as FlashAttention's variable-length functions take them; or a
            nested tensor `[B, Nq, Hq, D]`, or `[B, Hq, Nq, D]` by `transpose(1, 2)`.
        k, v: keys `[total_k, Hkv, D]` and values `[total_k, Hkv, Dv]`, or nested tensors.
        cu_seqlens_q: the running sums of the query lengths, from 0 to `total_q`: integers `[B + 1]`, a list or a
            tensor. A sequence may be empty.
        cu_seqlens_k: the running sums of the key lengths; by default `cu_seqlens_q`.
        pattern: the live scores within a sequence; None: all. A function of one argument, such as `masks.causal`, takes
            the length and returns the mask; if a sequence has different numbers of queries and keys, it takes both, and
            most masks then align the last query with the last key. A function of two arguments is a rule, as for
            `BlockMask.from_function`: it takes the positions of queries and keys, int64 tensors, where the last query
            and the last key of a sequence are at the same position.
        block: tokens per side of a tile, for the mask of a rule and of None; other patterns choose their own.
        scores: score modifications, as for `attention`, with positions in the sequence: to ALiBi, tables and a function
            each sequence is a call of its own, whose last query is at the position of its last key. A function's b is
            the number of the sequence, its q and k are indices in the sequence. Tensors along tokens are packed, with a
            batch size of 1: `key_bias [1, Hq or 1, total_k]`, `temperature [1, Hq or 1, total_q]`, `bias [1, Hq or 1,
            total_q, total_k]`. A `tile_bias` is made for the mask that `varlen_mask` makes of the same arguments.
        scale, return_lse, dropout_p, seed, backend: as for `attention`; lse is `[Hq, total_q]`.

    Returns:
        `out [total_q, Hq, Dv]`, nested if q is, or `(out, lse)`.

    Raises:
        TypeError, ValueError: the arguments do not fit together.

    One mask is made for the packed tokens, without any N x N matrix. It is cached by lengths, `pattern` and the numbers
    and tensors that this captures, so pass the same function object at every call, not a new lambda. The lengths are
    read on the host: pass `cu_seqlens` on the CPU, or else the first call with a tensor on a GPU waits for it, and in
    compiled code it breaks the graph. In `torch.export` (`strict=False`) and under `FakeTensorMode` the lengths must be
    a list or a tensor from outside.
    """
    if others:
        refuse(others, "attention_varlen", _REMEDIES)
    if any(isinstance(x, Tensor) and x.is_nested for x in (q, k, v)):
        if cu_seqlens_q is not None or cu_seqlens_k is not None:
            raise TypeError("cu_seqlens must not be given with nested tensors, which hold them; got both.")
        return _nested(q, k, v, pattern, block, scale, return_lse, dropout_p, seed, scores, backend)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 3:
            shown = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a tensor of packed tokens, [tokens, heads, head dim]; got {shown}.")
    if cu_seqlens_q is None:
        raise TypeError("cu_seqlens_q must be given unless q, k and v are nested tensors; got None.")
    mask, q_len, k_len, changes = mask_and_scores(cu_seqlens_q, cu_seqlens_k, pattern, block, q.device, scores)
    for name, got, want in (("q", q.shape[0], q_len), ("k", k.shape[0], k_len)):
        if got != want:
            raise ValueError(f"cu_seqlens_{name} must end with the number of tokens of {name}, {got}; got {want}.")
    out, lse = attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], mask, scale=scale, return_lse=True,
        dropout_p=dropout_p, seed=seed, scores=changes, backend=backend,
    )  # fmt: skip
    out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)  # not an index, whose gradient is a copy into zeros
    return (out, lse) if return_lse else out


_REMEDIES = {
    "mask": (
        "pass the pattern of a sequence, a function of its length or a rule for positions. For a mask of all packed "
        "tokens use attention(q.transpose(0, 1)[None], ...)"
    ),
    "lengths": "cu_seqlens has the lengths of the sequences; pass a pattern with_lengths for tokens past them",
    "causal": "pass pattern=masks.causal",
    "window_size": "pass pattern=functools.partial(masks.local, left=left, right=right)",
    "alibi_slopes": "pass scores=scores.alibi(alibi_slopes)",
    "softcap": "pass scores=scores.softcap(softcap)",
    "block_size": "the size of a tile is called block",
    "cu_seqlens": "it is called cu_seqlens_q",
    "max_seqlen": "it follows from cu_seqlens_q",
    "max_seqlen_q": "it follows from cu_seqlens_q",
    "max_seqlen_k": "it follows from cu_seqlens_k",
    "softmax_scale": "it is called scale",
}
without_others(attention_varlen)


def _nested(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | None, block: Block, *options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    packed: list[Any] = []  # annotations of nested tensors lack their methods
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or not x.is_nested or x.layout != torch.jagged or x.ndim != 4:
            got = f"{x.layout} of {x.ndim} dimensions" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(
                f"{name} must be a nested tensor of layout torch.jagged, [batch, tokens, heads, head dim], as the "
                f"others are; got {got}."
            )
        if x._ragged_idx == 2:  # type: ignore[attr-defined]
            x = x.transpose(1, 2)
        if x._ragged_idx != 1 or x.lengths() is not None:  # type: ignore[attr-defined]
            raise ValueError(f"{name} must have no gaps between its sequences; got a view. Call .contiguous().")
        packed.append(x)
        plain_tensor(packed[-1].offsets(), f"the offsets of {name}")
    if not torch.equal(packed[1].offsets(), packed[2].offsets()):
        raise ValueError("k and v must have sequences of the same lengths; got different ones.")
    scale, return_lse, dropout_p, seed, scores, backend = options
    sums = packed[0].offsets()
    out, lse = attention_varlen(
        packed[0].values(), packed[1].values(), packed[2].values(), sums, packed[1].offsets(), pattern, block=block,
        scale=scale, return_lse=True, dropout_p=dropout_p, seed=seed, scores=scores, backend=backend,
    )  # fmt: skip

    def nested(x: Tensor) -> Tensor:
        made: Tensor = torch.nested.nested_tensor_from_jagged(x.contiguous(), sums)
        return made

    headwise = q._ragged_idx == 2  # type: ignore[attr-defined]
    out, lse = nested(out), nested(lse.transpose(0, 1))
    if headwise:
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    return (out, lse) if return_lse else out


def varlen_mask(
    cu_seqlens_q: Any, cu_seqlens_k: Any = None, pattern: Pattern | None = None, *, block: Block = 128,
    device: torch.device | str = "cpu",
) -> BlockMask:  # fmt: skip
    """The mask of packed sequences that `attention_varlen` uses: the pattern within each sequence.

    >>> from sparseflash import masks
    >>> varlen_mask([0, 1000, 4000, 4096], pattern=masks.causal) == masks.documents([1000, 3000, 96], causal=True)
    True
    """
    mask: BlockMask | None = mask_and_scores(cu_seqlens_q, cu_seqlens_k, pattern, block, device)[0]
    if mask is None:
        raise ValueError("cu_seqlens must be of at least one query and one key to make a mask; got none.")
    return mask


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="lengths are read on the host. Call varlen_mask outside and attention with its mask, or compile without "
    "fullgraph=True."
)
def mask_and_scores(
    cu_seqlens_q: Any, cu_seqlens_k: Any, pattern: Pattern | None, block: Block, device: torch.device | str,
    scores: Scores | Change | None = None,
) -> tuple[BlockMask | None, int, int, Scores | None]:  # fmt: skip
    """`(mask, queries, keys, score modifications)` of all sequences together; no mask without a query or a key.

    >>> mask_and_scores([0, 5], [0, 0], None, 128, "cpu")
    (None, 5, 0, None)
    """
    with contents_when_faking():
        q_sums = running_sums(cu_seqlens_q, "cu_seqlens_q")
        k_sums = q_sums if cu_seqlens_k is None else running_sums(cu_seqlens_k, "cu_seqlens_k")
    if len(q_sums) != len(k_sums):
        raise ValueError(
            f"cu_seqlens_k must be of as many sequences as cu_seqlens_q, {len(q_sums) - 1}; got {len(k_sums) - 1}."
        )
    check_pattern(pattern)
    try:
        hash(pattern)
    except TypeError:  # such as a dataclass, or a frozen one with a list; its method has a hash
        called: Any = pattern
        pattern = called.__call__
    q_len, k_len = q_sums[-1], k_sums[-1]
    version = _version(pattern)
    key = q_sums, k_sums, pattern, version, block_pair(block), checked_device(device)

    def make() -> BlockMask:
        with contents_when_faking():
            made = _made(q_sums, k_sums, pattern, block)
        if version:
            _versions[pattern] = Captured(pattern), version  # as the pattern has left it, which may count its calls
        return made.to(device)

    mask = once(_masks, key, make) if q_len and k_len else None
    changes = None if scores is None else packed(scores_of(scores), q_sums, k_sums, checked_device(device))
    return mask, q_len, k_len, changes


def _version(pattern: Pattern | None) -> int:
    """A number that changes with anything that the pattern reads; 0 for patterns of this library."""
    defined: Any = pattern if isinstance(pattern, FunctionType) else type(pattern)
    if pattern is None or str(defined.__module__).startswith("sparseflash."):
        return 0
    known = _versions.get(pattern)
    if known is not None and known[0].is_still(Captured(pattern)):
        return int(known[1])
    return next(_numbers)


def _made(
    q_sums: tuple[int, ...], k_sums: tuple[int, ...], pattern: Pattern | None, block: Block, may_ask: bool = True
) -> BlockMask:
    """may_ask: False for a call that `asked_for` has found, about which it would find nothing more."""
    q_sizes, k_sizes = ([stop - start for start, stop in pairwise(sums)] for sums in (q_sums, k_sums))
    sizes = list(zip(q_sizes, k_sizes, strict=True))
    if not any(q_size and k_size for q_size, k_size in sizes):
        nothing = torch.zeros(0, dtype=torch.int64, device="cpu")
        block_q, block_k = block_pair(block)
        words = torch.zeros(0, block_q, bitmask.words_per_row(block_k), dtype=torch.int32, device="cpu")
        return BlockMask._of(q_sums[-1], k_sums[-1], block_q, block_k, [(nothing, nothing, nothing, words)])
    rule, options = (pattern, {}) if pattern is not None else (dense, {"block": block})
    if isinstance(pattern, partial) and not pattern.args:
        rule, options = pattern.func, pattern.keywords
    by_rule = is_rule(pattern)
    masks: dict[tuple[int, int], BlockMask] = {}
    lengths = list(dict.fromkeys(filter(None, q_sizes)))
    is_asked = rule not in NESTED or (rule in (local, chunked, streaming, a_shape) and len(lengths) <= FEW_LENGTHS)
    if may_ask and pattern is not None and is_asked and not by_rule and q_sums == k_sums:
        heads, masks = asked_for(pattern, lengths)
        if heads:
            made: dict[int, BlockMask] = {}
            for each in heads:
                if id(each) in made:
                    continue
                if isinstance(each, list):
                    made[id(each)] = packed_runs(each, q_sizes)
                else:
                    made[id(each)] = _made(q_sums, k_sums, each, block, False)
            return stack_heads([made[id(each)] for each in heads])
    if (rule is causal or rule is dense) and options.keys() <= {"block"}:
        return documents(q_sizes, k_sizes, causal=rule is causal, **options)
    nested = by_rule or (rule in NESTED and options.keys().isdisjoint(OF_ONE_LENGTH))
    made_of = _longest_of(sizes) if nested else {size: size for size in sizes if 0 not in size}
    asked = dict.fromkeys(made_of.values())
    whole = max((q for q, k in asked if q == k), default=0) if by_rule else 0
    masks |= {
        size: made_for(pattern, by_rule, *size, block)
        for size in asked
        if size not in masks and (size[0] != size[1] or size[0] >= whole)
    }
    masks |= {(q, k): masks[whole, whole].crop(q=(0, q), k=(0, k)) for q, k in asked if (q, k) not in masks}
    starts = zip(q_sums, k_sums)
    parts = [(masks[made_of[size]], *start, *size) for size, start in zip(sizes, starts) if size in made_of]
    return place(parts, q_sums[-1], k_sums[-1])


def _longest_of(sizes: list[tuple[int, int]]) -> dict[tuple[int, int], tuple[int, int]]:
    """For each length the length of the mask that it is cut from, for a pattern whose masks are nested.

    That mask is at most a few times as long, so that few of its tiles are cut off, unless it is short and has few
    parts. Different numbers of queries and keys have a mask of their own, because it begins at other positions.
    """
    least = 10 if len(sizes) <= 128 else 0  # below 1,024 tokens
    longest: dict[int, int] = {}
    for q_size, k_size in sizes:
        if q_size == k_size:
            power = max(q_size.bit_length(), least)
            longest[power] = max(q_size, longest.get(power, 0))
    return {
        (q, k): (longest[max(q.bit_length(), least)],) * 2 if q == k else (q, k)
        for q, k in dict.fromkeys(sizes)
        if q and k
    }
