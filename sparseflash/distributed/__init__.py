"""Attention over a sequence whose tokens lie on several ranks (context parallelism), for any block mask.

    plan = distributed.shard(mask, group)                       # who holds which tokens, which keys travel
    x = plan.scatter(embed(tokens))                             # [B, n, C], this rank's tokens; backward gathers
    q, k = rotate(q, plan.positions), rotate(k, plan.positions)
    out = distributed.attention(q, k, v, plan)                  # [B, H, n, D], with gradients
    loss = loss_of(plan.gather(logits))

`planner` deals chunks of tokens to the ranks. From the mask's lists every rank computes the key blocks that it needs
from each rank (`routes`); these are sent (`exchange`), or heads (`ulysses`) or queries (`queries`) travel. The cost
model (`costs`) chooses.
"""

from sparseflash.distributed.attention import attention
from sparseflash.distributed.costs import H100, H100_HOSTS, Estimate, Machine, Shape
from sparseflash.distributed.plan import ShardPlan
from sparseflash.distributed.sharding import shard
from sparseflash.distributed.shards import Shards

__all__ = ["H100", "H100_HOSTS", "Estimate", "Machine", "Shape", "ShardPlan", "Shards", "attention", "shard"]
