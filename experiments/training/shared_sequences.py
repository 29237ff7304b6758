"""Context parallelism: several processes share the tokens of a batch's sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from experiments.training.distributed import Ranks
from sparseflash import BlockMask
from sparseflash.distributed import ShardPlan, shard


def check_shareable(*, processes: int, attention: str, longest: int, block: int, length_option: str) -> None:
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
    """A mask that is constant over batches decides. The cache holds at most two plans for each mask and row length."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks  # the mesh would keep its process groups
        # With the mask, so that its id stays unique.
        self._plans: dict[tuple[int, bool], tuple[BlockMask, ShardPlan]] = {}

    def plan(self, mask: BlockMask, like: ShardPlan | None = None) -> ShardPlan:
        # Tensors of inference mode cannot be used in training.
        key = id(mask), torch.is_inference_mode_enabled()
        if key not in self._plans:
            assert self.ranks.mesh is not None
            self._plans[key] = mask, shard(mask, self.ranks.mesh["cp"], like=like)
        return self._plans[key][1]

    def plan_once(self, mask: BlockMask, like: ShardPlan) -> ShardPlan:
        return shard(mask, like.process_group, like=like)

    def padded(self, plan: ShardPlan, lengths: Tensor) -> ShardPlan:
        return self.plan_once(plan.mask.with_lengths(lengths.cpu()), plan)

    def gather(self, x: Tensor, plan: ShardPlan) -> Tensor:
        """Features [B, N, W] of all tokens, from this process's [B, n, W].

        Every process computes the same loss. Parameters used after this have equal gradients; for those before it, each
        process has N times its tokens' part, so the mean is the sum of all parts.
        """
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * plan.ranks)
        return plan.gather(x)

    def clear(self) -> None:
        self._plans.clear()
