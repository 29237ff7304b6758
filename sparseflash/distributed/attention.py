"""`attention` over tokens that lie on several ranks."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from sparseflash.attention import Backend, as_autocast_wants
from sparseflash.attention import attention as local_attention
from sparseflash.distributed.agreement import check_agreement
from sparseflash.distributed.costs import Shape
from sparseflash.distributed.exchange import Transfers, arrived, exchanged, for_each_stage
from sparseflash.distributed.merge import merged
from sparseflash.distributed.plan import ShardPlan
from sparseflash.distributed.queries import merged_with_remote
from sparseflash.distributed.ulysses import to_heads, to_tokens
from sparseflash.validation import check_tensors, checked_scale

_KINDS_OF_CALLS = 256


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: ShardPlan, *, scale: float | None = None,
    return_lse: Literal[False] = False, dropout_p: float = 0.0, backend: Backend | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: ShardPlan, *, scale: float | None = None,
    return_lse: Literal[True], dropout_p: float = 0.0, backend: Backend | None = None,
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
        dropout_p: must be 0. A weight's fate is computed from the positions of its query and key in the tensors of one
            call, and the kernels take no others, so the weights that one GPU drops could not be dropped here.

    Returns:
        This rank's part of `out [B, Hq, n, Dv]`, or of `(out, lse)`.

    Every rank of the group must make the same calls in the same order, forward and backward. The first call of each
    kind compares masks, shards, shapes, dtypes and options between the ranks (one small gather, which waits for the
    device). If a rank dies, the others raise what their backend of torch.distributed raises, at the latest after the
    group's timeout.

    The result does not depend on timing: parts are merged in the order of the stages, and gradients of keys are summed
    in the order of the ranks, in fp32. It rounds differently from one GPU's: partial results are rounded to the inputs'
    dtype before they are merged. With `strategy="heads"` nothing is summed.

    `torch.compile` leaves this function out of its graphs: it breaks the graph before and after it.

    Raises:
        TypeError, ValueError: tensors, plan and mask do not fit together, or the ranks differ.
    """
    check_tensors(q, k, v)
    if not isinstance(plan, ShardPlan):
        raise TypeError(f"plan must be a ShardPlan, made by distributed.shard(mask, group); got {type(plan).__name__}.")
    if dropout_p != 0.0:
        raise ValueError(
            f"dropout_p must be 0 over several ranks; got {dropout_p}. The kernels draw dropout by positions within "
            "one call, so the weights that one GPU drops could not be dropped here. Use dropout outside attention."
        )
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = as_autocast_wants(q, k, v)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype; got {q.dtype}, {k.dtype} and {v.dtype}.")
    _check_shapes(q, k, plan)
    shape = Shape(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype)
    scale = checked_scale(scale, q.shape[-1])
    way = plan.chosen(shape)
    _check_ranks_agree(q, k, v, plan, shape, (way.strategy, way.stages, scale, backend))
    if way.strategy == "heads":
        out, lse = _with_heads_travelling(q, k, v, plan, scale, backend)
    elif way.strategy == "queries":
        out, lse = _with_queries_travelling(q, k, v, plan, scale, backend)
    else:
        out, lse = _with_keys_travelling(q, k, v, plan, scale, backend, way.stages)
    return (out, lse) if return_lse else out


def _with_keys_travelling(
    q: Tensor, k: Tensor, v: Tensor, plan: ShardPlan, scale: float, backend: Backend | None, exchanges: int
) -> tuple[Tensor, Tensor]:
    stages = plan.stages_for(k.shape[0], k.shape[1], exchanges)
    transfers = Transfers(stages, plan.process_group, plan.rank, plan.sent)
    queries = for_each_stage(q, len(stages))
    (keys, values), pending = exchanged([k, v], transfers)
    parts = []
    for number, stage in enumerate(stages):
        if number > 0:
            keys, values = arrived(pending[number - 1], number, transfers, [k, v])
        mask = stage.mask_on(q.device)
        # Called even where no tile is live: the backward of every stage must send, because others wait for it.
        parts.append(
            local_attention(queries[number], keys, values, mask, scale=scale, return_lse=True, backend=backend)
        )
    return merged(parts)


def _with_queries_travelling(
    q: Tensor, k: Tensor, v: Tensor, plan: ShardPlan, scale: float, backend: Backend | None
) -> tuple[Tensor, Tensor]:
    stages = plan.query_stages_for(q.shape[0], q.shape[1])
    transfers = Transfers(stages, plan.process_group, plan.rank, plan.sent)
    keys, values = (for_each_stage(x, len(stages)) for x in (k, v))
    (queries,), pending = exchanged([q], transfers)
    parts = []
    for number, stage in enumerate(stages):
        if number > 0:
            (queries,) = arrived(pending[number - 1], number, transfers, [q])
        mask = stage.mask_on(q.device)
        parts.append(
            local_attention(queries, keys[number], values[number], mask, scale=scale, return_lse=True, backend=backend)
        )
    (out, lse), (remote_out, remote_lse) = parts
    return merged_with_remote(out, lse, remote_out, remote_lse, transfers)


def _with_heads_travelling(
    q: Tensor, k: Tensor, v: Tensor, plan: ShardPlan, scale: float, backend: Backend | None
) -> tuple[Tensor, Tensor]:
    group, sent = plan.process_group, plan.sent
    q_whole = to_heads(q, plan.queries, group, sent)
    k_whole, v_whole = (to_heads(x, plan.keys, group, sent) for x in (k, v))
    mask = plan.mask_of_heads(q.shape[1], q.device)
    out, lse = local_attention(q_whole, k_whole, v_whole, mask, scale=scale, return_lse=True, backend=backend)
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
    batch, heads = plan.mask.pattern.shape
    if batch not in (1, q.shape[0]):
        raise ValueError(f"mask must be for 1 or {q.shape[0]} batch elements, as q has; it is for {batch}.")
    if heads not in (1, q.shape[1]):
        raise ValueError(f"mask must be for 1 or {q.shape[1]} heads, as q has; it is for {heads}.")


def _check_ranks_agree(
    q: Tensor, k: Tensor, v: Tensor, plan: ShardPlan, shape: Shape, options: tuple[object, ...]
) -> None:
    """Compares the first call of each kind. All ranks remember the same calls, so that all or none compare."""
    gradients = tuple(torch.is_grad_enabled() and x.requires_grad for x in (q, k, v))
    kind = shape, options, gradients
    if kind in plan.agreed or plan.ranks == 1:
        return
    parts = {
        "mask": plan.mask.digest,
        "shards": plan.assignment.digest,
        "shapes": (shape.batch, shape.heads, shape.kv_heads, shape.dim, shape.v_dim),
        "dtype": shape.dtype,
        "strategy, stages, scale, backend": options,
        "requires_grad of q, k, v": gradients,
    }
    check_agreement(parts, plan.process_group, q.device)
    if len(plan.agreed) >= _KINDS_OF_CALLS:
        plan.agreed.clear()
    plan.agreed[kind] = None
