"""`ShardPlan`: where the tokens of a mask lie on the ranks of a group, and the traffic and cost of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import check_at_least_one, check_floating
from sparseflash.blockmask.cache import BoundedDict
from sparseflash.distributed import costs
from sparseflash.distributed.collect import gathered, scattered
from sparseflash.distributed.costs import MOST_STAGES, Estimate, Loads, Machine, Shape, Traffic, default_machine
from sparseflash.distributed.exchange import Sent
from sparseflash.distributed.explain import explained
from sparseflash.distributed.planner import Assignment
from sparseflash.distributed.positions import Positions
from sparseflash.distributed.queries import query_stages, turned
from sparseflash.distributed.routes import Heads, Readers
from sparseflash.distributed.shards import Shards
from sparseflash.distributed.stages import Route, stages_of
from sparseflash.distributed.transport import Transport
from sparseflash.distributed.transport_choice import TransportName, transport_of

T = TypeVar("T")
Side = Literal["queries", "keys"]
Strategy = Literal["auto", "keys", "queries", "heads"]
STRATEGIES = ("auto", "keys", "queries", "heads")
_KINDS_OF_CALLS = 64


@dataclass(eq=False)
class ShardPlan:
    """Where the tokens of a mask lie, and the exchanges of attention over them. Made by `shard`.

    `mask`: the whole mask, on the CPU, with its lengths written into the tiles; `queries`, `keys`: their shards, one
    object if they are the same tokens; `rank`, `ranks`: of this process; `strategy`, `stages`, `transport`: as given to
    `shard`; `sent`: the bytes and messages of attention with this plan so far.
    """

    mask: BlockMask
    assignment: Assignment
    group: dist.ProcessGroup | None
    rank: int
    ranks: int
    strategy: Strategy = "auto"
    stages: int | None = None
    transport: TransportName = "auto"
    sent: Sent = field(default_factory=Sent)
    # Not emptied by `clear_caches`: all ranks must remember the same calls.
    agreed: dict[object, None] = field(default_factory=dict, repr=False)
    _made: BoundedDict = field(default_factory=lambda: BoundedDict(_KINDS_OF_CALLS), repr=False)

    @property
    def queries(self) -> Shards:
        """Which query lies on which rank."""
        return self.assignment.queries

    @property
    def keys(self) -> Shards:
        """Which key lies on which rank."""
        return self.assignment.keys

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group; ValueError if the plan was made without one."""
        if self.group is None:
            raise ValueError(
                "plan must be of a process group to exchange anything; it was made with ranks=. Use shard(mask, group)."
            )
        return self.group

    @cached_property
    def positions(self) -> Tensor:
        """The positions of this rank's tokens (queries) in the whole sequence, ascending, for rotary embeddings: int64
        `[n]`, on the CPU.
        """
        return self.queries.positions(self.rank)

    @cached_property
    def key_positions(self) -> Tensor:
        """The positions of this rank's keys; equal to `positions` if `q_len == k_len`."""
        return self.keys.positions(self.rank)

    def scatter(self, x: Tensor, dim: int = -2, *, side: Side = "queries") -> Tensor:
        """This rank's tokens of a tensor that every rank holds whole.

        Args:
            x: the whole tensor, the same on every rank.
            dim: the dimension of the tokens: -2 for `[B, H, N, D]` and `[B, N, C]`, -1 for token numbers `[B, N]`.
            side: "queries" or "keys", if `q_len != k_len`.

        Forward sends nothing. Backward gathers the whole gradient on every rank.
        """
        shards = self._shards(side)
        self._check_dim(x, dim, shards.length, "the whole sequence")
        return scattered(x, dim, shards, self.rank, self.process_group if x.requires_grad else None)

    def gather(self, x: Tensor, dim: int = -2, *, side: Side = "queries") -> Tensor:
        """The whole tensor on every rank, from this rank's tokens; the inverse of `scatter`.

        Backward takes this rank's tokens of the gradient, without a sum: every rank must compute the same from the
        whole tensor, such as a loss.
        """
        shards = self._shards(side)
        self._check_dim(x, dim, shards.counts[self.rank], "this rank's share")
        return gathered(x, dim, shards, self.rank, self.process_group)

    @cached_property
    def readers(self) -> Readers:
        """Which rank reads which key blocks."""
        return Readers.of(self.mask, self.assignment, self.ranks)

    @cached_property
    def loads(self) -> Loads:
        return Loads.of(self.mask, self.assignment, self.readers)

    def traffic(self, batch: int, kv_heads: int) -> Traffic:
        """The keys that each rank sends and receives if keys travel."""
        return self._once(
            ("traffic", batch, kv_heads), lambda: Traffic.of(self.readers, Heads.of(self.mask.pattern, batch, kv_heads))
        )

    def stages_for(
        self, batch: int, kv_heads: int, stages: int, *, same_slots: bool = False, local_first: bool = False
    ) -> Route:
        """This rank's attention to local keys and its exchanges, for tensors of that many heads; made once."""
        return self._once(
            ("stages", batch, kv_heads, stages, same_slots, local_first),
            lambda: stages_of(
                self.mask, self.assignment, self.readers, self.rank, Heads.of(self.mask.pattern, batch, kv_heads),
                stages, same_slots=same_slots, local_first=local_first,
            ),
        )  # fmt: skip

    def transport_on(self, device: torch.device) -> Transport:
        """The transport of rows between tensors on a device. A collective call, the first time in a group."""
        return transport_of(self.process_group, device, self.transport)

    def machine(self, overlaps: bool | None = None) -> Machine:
        """The default constants. `overlaps`: whether attention runs during exchanges; by default, whether the plan's
        transport can on such GPUs."""
        machine = default_machine(self.ranks)
        overlaps = machine.overlaps and self.transport != "collective" if overlaps is None else overlaps
        return replace(machine, overlaps=overlaps)

    @cached_property
    def _turned(self) -> tuple[BlockMask, Readers, Loads]:
        mask, assignment = self.mask.transpose(), turned(self.assignment)
        readers = Readers.of(mask, assignment, self.ranks)
        return mask, readers, Loads.of(mask, assignment, readers)

    def query_traffic(self, batch: int, heads: int) -> Traffic:
        """The queries that each rank sends and receives if queries travel."""
        mask, readers, _ = self._turned
        return self._once(
            ("query traffic", batch, heads), lambda: Traffic.of(readers, Heads.of(mask.pattern, batch, heads))
        )

    def query_stages_for(self, batch: int, heads: int, *, same_slots: bool = False) -> Route:
        """This rank's attention of local and received queries to its keys; made once."""
        mask, readers, _ = self._turned
        return self._once(
            ("query stages", batch, heads, same_slots),
            lambda: query_stages(
                mask, self.assignment, readers, self.rank, Heads.of(mask.pattern, batch, heads), same_slots=same_slots
            ),
        )  # fmt: skip

    def own_heads(self, heads: int) -> slice:
        """This rank's share of `heads` query heads, if heads travel."""
        share = heads // self.ranks
        return slice(self.rank * share, (self.rank + 1) * share)

    def mask_of_heads(self, heads: int, device: torch.device) -> BlockMask:
        """The whole mask of this rank's share of `heads` query heads."""
        mine = self.own_heads(heads) if self.mask.shape[1] > 1 else None
        return self._once(("heads", heads, device), lambda: self.mask.select(heads=mine).to(device))

    def positions_of(self, side: Side) -> Positions:
        tokens = self.positions if side == "queries" else self.key_positions
        return self._once(("positions", side), lambda: Positions(tokens, self._shards(side).length))

    def heads_refused(self, shape: Shape) -> str:
        if self.transport == "peer":
            return "they travel by collectives, and transport is 'peer'"
        if shape.kv_heads % self.ranks:
            return f"{shape.kv_heads} key heads are not a multiple of {self.ranks} ranks"
        return ""

    def estimates(self, shape: Shape, machine: Machine | None = None) -> list[Estimate]:
        machine = machine or self.machine()
        q_tokens, k_tokens = np.array(self.queries.counts), np.array(self.keys.counts)
        found = []
        traffic = self.traffic(shape.batch, shape.kv_heads)
        if self.strategy in ("auto", "keys"):
            given = range(MOST_STAGES + 1) if self.stages is None else [self.stages]
            for stages in given if traffic.sent.any() else [0]:
                found.append(costs.keys_travel(self.loads, traffic, q_tokens, k_tokens, shape, stages, machine))
        if self.strategy == "queries" or (self.strategy == "auto" and traffic.sent.any()):
            queries = self.query_traffic(shape.batch, shape.heads)
            found.append(costs.queries_travel(self._turned[2], queries, q_tokens, shape, machine))
        if self.strategy in ("auto", "heads") and not self.heads_refused(shape):
            pattern = self.mask.pattern.numpy()
            found.append(costs.heads_travel(self.loads, pattern, q_tokens, k_tokens, shape, machine))
        return found

    def chosen(self, shape: Shape, machine: Machine | None = None) -> Estimate:
        if self.strategy == "heads" and self.heads_refused(shape):
            raise ValueError(
                f"strategy must be 'keys', 'queries' or 'auto' for this call, as heads cannot be shared out: "
                f"{self.heads_refused(shape)}; got 'heads'. Pass it to distributed.shard(mask, strategy='auto')."
            )
        return self._once((shape, machine), lambda: min(self.estimates(shape, machine), key=lambda each: each.total))

    def explain(
        self, *, batch: int = 1, heads: int | None = None, kv_heads: int | None = None, dim: int = 128,
        v_dim: int | None = None, dtype: torch.dtype = torch.bfloat16, machine: Machine | None = None,
    ) -> str:  # fmt: skip
        """A table of the bytes, the balance and the estimated time of a call with these sizes.

        >>> from sparseflash import distributed, masks
        >>> print(distributed.shard(masks.causal(65536), ranks=4).explain(heads=8).splitlines()[0])
        65536 tokens over 4 ranks: zigzag, in chunks of 128; 16384 tokens a rank

        Args:
            heads, kv_heads: the query and key heads; by default the mask's heads, and as many key heads.
            batch, dim, v_dim, dtype: the other sizes of the call.
            machine: the constants of the model, by default guesses for H100s on one host or, for more than 8 ranks, on
                several.

        `attention` chooses by the same estimates with the default constants; without overlap if the GPUs of one host
        cannot read each other's memory.
        """
        heads = self.mask.shape[1] if heads is None else heads
        kv_heads = heads if kv_heads is None else kv_heads
        v_dim = dim if v_dim is None else v_dim
        check_at_least_one(batch=batch, heads=heads, kv_heads=kv_heads, dim=dim, v_dim=v_dim)
        check_floating(dtype)
        if not isinstance(machine, Machine | None):
            raise TypeError(f"machine must be a distributed.Machine or None; got {machine!r}.")
        return explained(self, Shape(batch, heads, kv_heads, dim, v_dim, dtype), machine or self.machine())

    def _once(self, key: object, make: Callable[[], T]) -> T:
        found: T | None = self._made.get(key)
        return self._made.put(key, make()) if found is None else found

    def _shards(self, side: Side) -> Shards:
        if side not in ("queries", "keys"):
            raise ValueError(f"side must be 'queries' or 'keys'; got {side!r}.")
        return self.queries if side == "queries" else self.keys

    def _check_dim(self, x: Tensor, dim: int, count: int, what: str) -> None:
        if not -x.ndim <= dim < x.ndim or x.shape[dim] != count:
            raise ValueError(f"x must have {count} tokens, {what}, in dimension {dim}; got shape {list(x.shape)}.")
