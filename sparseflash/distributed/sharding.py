"""`shard`: from a mask and a group to a `ShardPlan`."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import check_at_least_one, checked_mask, integer
from sparseflash.distributed.costs import MOST_STAGES
from sparseflash.distributed.plan import STRATEGIES, ShardPlan, Strategy
from sparseflash.distributed.planner import assign
from sparseflash.distributed.transport_choice import TRANSPORTS, TransportName


def shard(
    mask: BlockMask,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    ranks: int | None = None,
    rank: int = 0,
    like: ShardPlan | None = None,
    strategy: Strategy = "auto",
    stages: int | None = None,
    transport: TransportName = "auto",
) -> ShardPlan:
    """Plans the attention of a mask over the ranks of a group: the tokens of each rank, and the keys that travel.

    Without processes, the plan of rank 0 of 4:

    >>> from sparseflash import masks
    >>> plan = shard(masks.causal(1024, block=64), ranks=4)
    >>> plan.positions.shape, plan.queries.counts
    (torch.Size([256]), [256, 256, 256, 256])

    Ranks hold equally many chunks of tokens, up to one; a chunk is one block or several, and the last may be ragged.
    They are dealt so that live tiles are balanced and few keys travel. If `q_len == k_len`, queries and keys are the
    same tokens.

    Args:
        mask: the whole mask, the same on every rank. Lengths are written into its tiles, and a dynamic mask is made
            canonical: both synchronise with the device.
        group: a process group, or a DeviceMesh of one dimension (`mesh["cp"]`); None: the default group.
        ranks, rank: instead of a group, plan for rank `rank` of `ranks` without processes; runs no attention.
        like: another plan of the same lengths, whose assignment of tokens is kept, for masks that change at every step
            or layer.
        strategy: `"keys"`: live remote keys travel to the queries, for any mask and heads; `"heads"`: all tokens of
            some heads travel to each rank (Ulysses), if the key heads are a multiple of the ranks; `"queries"`: queries
            travel to live remote keys, and partial results back, for few queries and many keys; `"auto"`: the cheapest
            by `explain`'s model.
        stages: the number of exchanges, 1 to 4, in which keys travel while attention to the keys at hand runs; 0:
            attention begins when all keys have arrived, without a merge; None: chosen by the model. Queries and heads
            do not travel in stages.
        transport: `"collective"`: NCCL's all-to-all, whose programs take turns with attention; `"peer"`: copies out of
            the other ranks' memory, beside attention, for GPUs of one host that can read each other's memory; `"auto"`:
            peer where possible. For `"peer"`, every GPU keeps a buffer for each group, as large as the largest sender
            has needed, outside of PyTorch's memory statistics. CUDA graphs need `"collective"`, and so do heads that
            travel.

    Raises ValueError for fewer blocks than ranks, a DeviceMesh of several dimensions, heads with copies between peers,
    stages of queries or heads, and `like` of other lengths, other ranks or a chunk that the mask's blocks do not
    divide.
    """
    mask = checked_mask(mask)
    group, rank, ranks = _place(group, rank, ranks)
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(map(repr, STRATEGIES))}; got {strategy!r}.")
    if stages is not None and not 0 <= integer(stages, "stages", "exchanges") <= MOST_STAGES:
        raise ValueError(f"stages must be 0 to {MOST_STAGES}, or None; got {stages}.")
    if stages is not None and strategy in ("queries", "heads"):
        raise ValueError(
            f"stages must be None with strategy={strategy!r}, because keys alone travel in stages; got {stages}."
        )
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(map(repr, TRANSPORTS))}; got {transport!r}.")
    if strategy == "heads" and transport == "peer":
        raise ValueError(
            "transport must be 'collective' or 'auto' with strategy='heads', because heads travel by collectives; got "
            "'peer'."
        )
    mask = mask.canonical().to("cpu").bake_lengths()
    if like is None:
        assignment = assign(mask, ranks)
    else:
        _check_like(mask, like, ranks)
        assignment = like.assignment
    return ShardPlan(mask, assignment, group, rank, ranks, strategy, stages, transport)


def _place(
    group: dist.ProcessGroup | DeviceMesh | None, rank: int, ranks: int | None
) -> tuple[dist.ProcessGroup | None, int, int]:
    """`(group, rank, ranks)`, checked."""
    if ranks is not None:
        if group is not None:
            raise ValueError("shard must be given a group or ranks, not both.")
        rank, ranks = integer(rank, "rank", ""), integer(ranks, "ranks", "")
        check_at_least_one(ranks=ranks)
        if not 0 <= rank < ranks:
            raise ValueError(f"rank must lie in 0..{ranks - 1}; got {rank}.")
        return None, rank, ranks
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a DeviceMesh of one dimension; got the dimensions {group.mesh_dim_names}. Pass one of "
                'them: mesh["cp"].'
            )
        group = group.get_group()
    elif group is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "torch.distributed must be initialised before shard(mask); call init_process_group and start with "
                "torchrun, or pass ranks= for a plan without processes."
            )
        group = dist.group.WORLD
    return group, dist.get_rank(group), dist.get_world_size(group)


def _check_like(mask: BlockMask, like: ShardPlan, ranks: int) -> None:
    if not isinstance(like, ShardPlan):
        raise TypeError(f"like must be a ShardPlan, made by distributed.shard(mask, group); got {type(like).__name__}.")
    ours, theirs = (mask.q_len, mask.k_len, ranks), (like.queries.length, like.keys.length, like.ranks)
    if ours != theirs:
        raise ValueError(
            "like must be a plan of the same lengths and ranks; it is of {} x {} tokens over {} ranks, got {} x {} "
            "over {}.".format(*theirs, *ours)
        )
    for side, block, chunk in (("q", mask.block_q, like.queries.chunk), ("k", mask.block_k, like.keys.chunk)):
        if chunk % block:
            raise ValueError(
                f"mask must have a block_{side} that divides the chunks of like, {chunk} tokens; got {block}. Use "
                "mask.reblock."
            )
