"""`attention` over tokens that lie on several ranks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from sparseflash.attention import Backend, attend, in_one_dtype
from sparseflash.attention import attention as local_attention
from sparseflash.blockmask import BlockMask
from sparseflash.distributed import dropout as drops
from sparseflash.distributed.costs import Shape
from sparseflash.distributed.exchange import Transfers, arrived, exchanged, for_each_stage
from sparseflash.distributed.plan import ShardPlan, Side
from sparseflash.distributed.queries import merged_with_remote
from sparseflash.distributed.query_rows import put_in_place, taken_apart
from sparseflash.distributed.scores import in_full_precision, of_heads, of_tokens, refuse_local, tells_positions
from sparseflash.distributed.stages import Stage
from sparseflash.distributed.transport import Transport
from sparseflash.distributed.ulysses import to_heads, to_tokens
from sparseflash.dropout import Dropout, seed_tensor, threshold
from sparseflash.merge import merge_attention, with_sink
from sparseflash.scores.change import Change, Scores, scores_of
from sparseflash.scores.sink import completed
from sparseflash.validation import check_patterns, check_tensors, checked_scale, prepared_scores

_KINDS_OF_CALLS = 256


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: ShardPlan, *, scale: float | None = None,
    return_lse: Literal[False] = False, dropout_p: float = 0.0, seed: int | Tensor | None = None,
    scores: Scores | Change | None = None, backend: Backend | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: ShardPlan, *, scale: float | None = None,
    return_lse: Literal[True], dropout_p: float = 0.0, seed: int | Tensor | None = None,
    scores: Scores | Change | None = None, backend: Backend | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: ShardPlan,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    scores: Scores | Change | None = None,
    backend: Backend | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of this rank's queries to the live keys of all ranks.

    On each rank (here the only one of a group of one):

    >>> import tempfile
    >>> import torch.distributed as dist
    >>> from sparseflash import distributed, masks
    >>> store = tempfile.NamedTemporaryFile()
    >>> dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
    >>> plan = distributed.shard(masks.causal(100, block=16))
    >>> q, k, v = (plan.scatter(torch.randn(1, 2, 100, 16)) for _ in range(3))
    >>> plan.gather(attention(q, k, v, plan)).shape
    torch.Size([1, 2, 100, 16])
    >>> dist.destroy_process_group()

    The arguments are those of `sparseflash.attention`, with these differences.

    Args:
        q: this rank's queries `[B, Hq, n, D]`, with `n = plan.queries.counts[plan.rank]`, at `plan.positions`.
        k: this rank's keys `[B, Hkv, m, D]`, with `m = plan.keys.counts[plan.rank]`, at `plan.key_positions`.
        v: this rank's values `[B, Hkv, m, Dv]`.
        plan: of the whole mask, from `shard`, the same on every rank.
        dropout_p: the same on every rank. The same seed drops the same weights as on one GPU.
        seed: the same on every rank; ints are compared at the first call of each kind, a tensor is not read. None: all
            use the seed that the group's first rank draws from the PyTorch generator of q's device, so generators
            within a group need not agree.
        scores: as on one GPU, the same on every rank, for all heads, with tensors along tokens whole. Each rank
            receives a part of the gradients of their tensors: sum these over the group, as for all parameters.
            Distances, relative tables and functions read positions from tensors, which costs more than on one GPU
            unless heads travel. Refused: a `tile_bias`; and on GPUs a learned tensor of more than 16,384 numbers a head
            that a function indexes by query and key (pass it as `scores.bias`).

    Returns:
        This rank's part of `out [B, Hq, n, Dv]`, or of `(out, lse)`.

    Every rank of the group must make the same calls in the same order, forward and backward. The first call of each
    kind compares masks, shards, shapes, dtypes and options (one small gather, which waits for the device). If a rank
    dies, the others raise the error of their torch.distributed backend, or with copies between peers a device error, at
    the latest after the group's timeout.

    The result does not depend on timing: parts are merged in the order of the stages, and gradients of a key are summed
    in fp32, the own rank's first and then by rank. It rounds differently than one GPU, except with `strategy="heads"`,
    where nothing is summed.

    `torch.compile` breaks its graph around this function. Gradients of gradients work only with `strategy="heads"` and
    `backend="reference"`.

    Raises:
        TypeError, ValueError: tensors, plan and mask do not fit together, or the ranks differ.
    """
    if torch.compiler.is_exporting():
        raise NotImplementedError(
            "distributed.attention must not be exported, because its exchanges are those of one plan and rank. Export "
            "the model with sparseflash.attention and the whole mask in its place."
        )
    check_tensors(q, k, v)
    if not isinstance(plan, ShardPlan):
        raise TypeError(f"plan must be a ShardPlan, made by distributed.shard(mask, group); got {type(plan).__name__}.")
    dropped = threshold(dropout_p)
    seeds = seed_tensor(seed, q.device) if dropped else None
    q, k, v = in_one_dtype(q, k, v)
    _check_shapes(q, k, plan)
    shape = Shape(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype)
    if scores is not None:
        refuse_local(scores_of(scores))
    changes = prepared_scores(scores, q, k, None, (plan.queries.length, plan.keys.length)) or Scores(())
    transport = plan.transport_on(q.device)
    way = plan.chosen(shape, plan.machine(transport.overlaps))
    if way.strategy != "heads":
        changes = in_full_precision(changes)
    call = _Call(plan, checked_scale(scale, q.shape[-1]), changes, backend, transport)
    options = way.strategy, way.stages, plan.transport, call.scale, backend
    _check_ranks_agree(q, k, v, call, shape, options, dropped, seed)
    if seeds is not None:
        call.dropout = Dropout(drops.of_first_rank(seeds, plan) if seed is None else seeds, dropped)
    sink = changes.find("sink")
    if way.strategy == "heads":
        out, lse = _with_heads_travelling(q, k, v, call)
        lse = lse if sink is None else completed(lse, sink.logits)
    else:
        if way.strategy == "queries":
            out, lse = _with_queries_travelling(q, k, v, call)
        else:
            out, lse = _with_keys_travelling(q, k, v, call, way.stages)
        if sink is not None:  # once for all the keys of a query, not once for each part of them
            out, lse = with_sink(out, lse, sink.logits)
    return (out, lse) if return_lse else out


@dataclass(eq=False)
class _Call:
    plan: ShardPlan
    scale: float
    changes: Scores
    backend: Backend | None
    transport: Transport
    dropout: Dropout | None = None

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, changes: Scores | None, dropout: Dropout | None
    ) -> tuple[Tensor, Tensor]:
        if dropout is not None:
            return attend(q, k, v, mask, self.scale, dropout, changes, self.backend)
        return local_attention(
            q, k, v, mask, scale=self.scale, return_lse=True, scores=changes, backend=self.backend
        )  # fmt: skip

    @property
    def needs_positions(self) -> bool:
        return self._changes_tell_positions or self.dropout is not None

    @cached_property
    def _changes_tell_positions(self) -> bool:
        return tells_positions(self.changes)

    def attention_of_stage(
        self, q: Tensor, k: Tensor, v: Tensor, stage: Stage, travelling: Side
    ) -> tuple[Tensor, Tensor]:
        changes, dropout = self.changes.without("sink"), self.dropout
        if self.needs_positions:
            if stage.positions is None:
                raise RuntimeError("a stage must be made with same_slots=True to have positions")
            queries = stage.positions if travelling == "queries" else stage.query_positions
            keys = stage.positions if travelling == "keys" else self.plan.positions_of("keys")
            if self._changes_tell_positions:
                shift = self.plan.keys.length - self.plan.queries.length
                changes = of_tokens(changes, queries.on(q.device), keys.on(q.device), shift)
            if dropout is not None:
                dropout = drops.of_tokens(dropout, queries, keys)
        return self.attention(q, k, v, stage.mask_on(q.device), changes if changes.changes else None, dropout)


def _with_keys_travelling(q: Tensor, k: Tensor, v: Tensor, call: _Call, exchanges: int) -> tuple[Tensor, Tensor]:
    plan, transport = call.plan, call.transport
    route = plan.stages_for(
        k.shape[0], k.shape[1], exchanges, same_slots=call.needs_positions, local_first=transport.overlaps
    )
    transfers = Transfers(route, transport, plan.sent)
    transport.begin(lambda: transfers.room([k, v]))
    rows = next((stage.queries_on(q.device) for stage in route.stages if stage.queries is not None), None)
    if rows is None:
        queries = for_each_stage(q, len(route.stages))
    else:  # two stages, of some queries and of all
        some, whole = taken_apart(q, rows)
        queries = [whole if stage.queries is None else some for stage in route.stages]
    local, pending = exchanged([k, v], transfers)
    parts = []
    for mine, stage in zip(queries, route.stages, strict=True):
        keys, values = arrived(pending[stage], stage, transfers, local) if stage.exchanges else local
        # Called even where no tile is live: the backward of every stage must send, because other ranks wait for it.
        parts.append(call.attention_of_stage(mine, keys, values, stage, "keys"))
    if rows is None:
        return merge_attention(*zip(*parts, strict=True))
    of_some, of_whole = parts if route.stages[1].queries is None else parts[::-1]
    return put_in_place(of_some, of_whole, rows)


def _with_queries_travelling(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    plan = call.plan
    route = plan.query_stages_for(q.shape[0], q.shape[1], same_slots=call.needs_positions)
    transfers = Transfers(route, call.transport, plan.sent)
    keys, values = (for_each_stage(x, len(route.stages)) for x in (k, v))
    local, pending = exchanged([q], transfers)
    parts = []
    for number, stage in enumerate(route.stages):
        (queries,) = arrived(pending[stage], stage, transfers, local) if stage.exchanges else local
        parts.append(call.attention_of_stage(queries, keys[number], values[number], stage, "queries"))
    (out, lse), (remote_out, remote_lse) = parts
    return merged_with_remote(out, lse, remote_out, remote_lse, transfers)


def _with_heads_travelling(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    plan = call.plan
    group, sent = plan.process_group, plan.sent
    q_whole = to_heads(q, plan.queries, group, sent)
    k_whole, v_whole = (to_heads(x, plan.keys, group, sent) for x in (k, v))
    batch, heads = q.shape[:2]
    own = plan.own_heads(heads)
    changes = of_heads(call.changes, own) if call.changes.changes else None
    dropout = None if call.dropout is None else drops.of_heads(call.dropout, batch, own, heads)
    out, lse = call.attention(q_whole, k_whole, v_whole, plan.mask_of_heads(heads, q.device), changes, dropout)
    local_lse = to_tokens(lse.unsqueeze(-1), plan.queries, group, sent).squeeze(-1)
    return to_tokens(out, plan.queries, group, sent), local_lse


def _check_shapes(q: Tensor, k: Tensor, plan: ShardPlan) -> None:
    for name, x, shards in (("q", q, plan.queries), ("k", k, plan.keys)):
        count = shards.counts[plan.rank]
        if x.shape[2] != count:
            advice = f" It looks whole: pass plan.scatter({name})." if x.shape[2] == shards.length else ""
            raise ValueError(
                f"{name} must hold the {count} tokens of rank {plan.rank} of {plan.ranks}; got {x.shape[2]}.{advice}"
            )
    check_patterns(plan.mask, q, k)


def _check_ranks_agree(
    q: Tensor, k: Tensor, v: Tensor, call: _Call, shape: Shape, options: tuple[object, ...], dropped: int,
    seed: int | Tensor | None,
) -> None:  # fmt: skip
    """All ranks remember the same calls, so that all or none compare."""
    plan, learned = call.plan, call.changes.tensors()
    gradients = tuple(torch.is_grad_enabled() and x.requires_grad for x in (q, k, v, *learned))
    changes = call.changes.described(), tuple((tuple(x.shape), x.dtype) for x in learned)
    given, number = drops.described(seed) if dropped else ("", None)
    # Without the seed's value, which may change at every step.
    kind = shape, options, changes, gradients, dropped, given
    if kind in plan.agreed or plan.ranks == 1:
        return
    parts = {
        "mask": plan.mask.digest,
        "shards": plan.assignment.digest,
        "shapes": (shape.batch, shape.heads, shape.kv_heads, shape.dim, shape.v_dim),
        "dtype": shape.dtype,
        "strategy, stages, transport, scale, backend": options,
        "scores": changes,
        "dropout_p": dropped / 256,
        "seed": given if number is None else number,
        "requires_grad of q, k, v and the tensors of scores": gradients,
    }
    _check_agreement(parts, plan.process_group, q.device)
    if len(plan.agreed) >= _KINDS_OF_CALLS:
        plan.agreed.clear()
    plan.agreed[kind] = None


def _check_agreement(parts: dict[str, object], group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises ValueError on every rank unless the parts, by name, are the same on all ranks of the group.

    One gather of eight bytes a part.
    """
    digests = [hashlib.blake2b(repr(part).encode(), digest_size=8).digest() for part in parts.values()]
    mine = torch.tensor([int.from_bytes(each, "little", signed=True) for each in digests], device=device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    table = torch.stack(found).tolist()
    differing = [name for name, column in zip(parts, zip(*table, strict=True), strict=True) if len(set(column)) > 1]
    if differing:
        own = "; ".join(f"{name}: {parts[name]}" for name in differing)
        kinds: dict[tuple[int, ...], list[int]] = {}
        for rank, row in enumerate(table):
            kinds.setdefault(tuple(row), []).append(rank)
        sides = " and ".join(str(ranks) for ranks in kinds.values())
        raise ValueError(
            f"all ranks must call attention with the same mask, shapes and options; they differ in "
            f"{', '.join(differing)} between the ranks {sides}. Here: {own}."
        )
