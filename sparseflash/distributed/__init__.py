"""Attention over a sequence whose tokens lie on several ranks (context parallelism), for any block mask.

    plan = distributed.shard(mask, group)                       # who holds which tokens, which keys travel
    x = plan.scatter(embed(tokens))                             # [B, n, C], this rank's tokens; backward gathers
    q, k = rotate(q, plan.positions), rotate(k, plan.positions)
    out = distributed.attention(q, k, v, plan)                  # [B, H, n, D], with gradients
    loss = loss_of(plan.gather(logits))

`shard` cuts the tokens into chunks and deals them to the ranks so that every rank has equally many tokens, about as
many live tiles, and few remote keys (`planner`). From the mask's lists every rank knows which key blocks it needs from
whom (`routes`); only those are sent (`exchange`), by a collective or by copies out of the memory of other GPUs
(`collectives` and `peer_copies`, of which `transport_choice` takes one): before attention begins, or in one to four
exchanges that overlap with attention to what is there already, and then the partial results are merged by their lse in
a fixed order (`merge`, on GPUs by the kernels of `fused_merge`). If there are heads enough and it costs less, heads
travel instead (`ulysses`), or queries to their keys if there are few (`queries`). `plan.explain()` prints the costs of
all (`costs`, `explain`). Changes of scores and dropout take the positions that tokens have in the whole sequence
(`positions`, `scores`, `dropout`).

It may import `attention`, `blockmask`, `dropout`, `scores` and `validation`, and of the Triton backend `device` and
`launcher`.
"""

from sparseflash.distributed.attention import attention as attention
from sparseflash.distributed.costs import H100 as H100
from sparseflash.distributed.costs import H100_HOSTS as H100_HOSTS
from sparseflash.distributed.costs import Estimate as Estimate
from sparseflash.distributed.costs import Machine as Machine
from sparseflash.distributed.costs import Shape as Shape
from sparseflash.distributed.merge import merged as merged
from sparseflash.distributed.plan import ShardPlan as ShardPlan
from sparseflash.distributed.sharding import shard as shard
from sparseflash.distributed.shards import Shards as Shards

__all__ = ["H100", "H100_HOSTS", "Estimate", "Machine", "Shape", "ShardPlan", "Shards", "attention", "merged", "shard"]
