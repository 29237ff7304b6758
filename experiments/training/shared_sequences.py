"""The tokens of a batch's sequences, shared out to several processes (context parallelism)."""

from __future__ import annotations

import torch
from torch import Tensor

from experiments.training.distributed import Ranks
from sparseflash import BlockMask
from sparseflash.distributed import ShardPlan, shard


def check_shareable(*, processes: int, attention: str, longest: int, block: int, length_option: str) -> None:
    """Raises ValueError for settings with which several processes cannot share a sequence.

    longest: the tokens of the longest sequences, which `length_option` sets.
    """
    if attention != "sparseflash":
        raise ValueError(
            f"attention must be sparseflash if context_parallel is above 1; got {attention}, which needs all tokens in "
            "one process"
        )
    if longest < processes * block:
        raise ValueError(
            f"the longest sequences must have at least {processes} blocks of {block} tokens, one for each process of "
            f"context_parallel; got {longest // block}: lower --block or --context-parallel, or raise {length_option}"
        )


class SharedSequences:
    """Which process holds which tokens, for rows of every length.

    The tokens lie where a mask that does not change from batch to batch puts them, so that they lie alike in all
    batches of one length. There are at most as many plans as lengths of rows, for each mask, twice.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks  # and not their mesh, which would keep its process groups
        # With the mask, so that its id stays its own.
        self._plans: dict[tuple[int, bool], tuple[BlockMask, ShardPlan]] = {}

    def plan(self, mask: BlockMask, like: ShardPlan | None = None) -> ShardPlan:
        """The plan of a mask that many batches have. like: a plan of other attention to the same tokens."""
        # Tensors that attention makes for a plan in inference mode cannot be used in training.
        key = id(mask), torch.is_inference_mode_enabled()
        if key not in self._plans:
            assert self.ranks.mesh is not None
            self._plans[key] = mask, shard(mask, self.ranks.mesh["cp"], like=like)
        return self._plans[key][1]

    def plan_once(self, mask: BlockMask, like: ShardPlan) -> ShardPlan:
        """The plan of a mask that one batch has, with the tokens where they are."""
        return shard(mask, like.process_group, like=like)

    def padded(self, plan: ShardPlan, lengths: Tensor) -> ShardPlan:
        """The plan for one batch, with the lengths [B] of its sequences."""
        return self.plan_once(plan.mask.with_lengths(lengths.cpu()), plan)

    def gather(self, x: Tensor, plan: ShardPlan) -> Tensor:
        """The features [B, N, W] of all tokens, from those of this process [B, n, W].

        Every process computes the same loss from them, and `DistributedDataParallel` takes the mean of the gradients.
        That is right for parameters used after this function, whose gradients are equal. For those used before it, each
        process has only the part of its own tokens, and the mean of N times the parts is their sum.
        """
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * plan.ranks)
        return plan.gather(x)

    def clear(self) -> None:
        """Forget the plans, which keep the process group and its threads."""
        self._plans.clear()
