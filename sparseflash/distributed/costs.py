"""A model of the bytes and the time of each strategy; `auto` takes the cheapest, `explain` prints it.

Bytes, tokens and live tiles are exact. Seconds, of a forward and a backward together, are estimates from four constants
of a machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.stats import pattern_count
from sparseflash.distributed.planner import Assignment, shares_of_tiles
from sparseflash.distributed.routes import Heads, Readers
from sparseflash.distributed.shards import Integers

Floats = NDArray[np.float64]
MOST_STAGES = 4
# The share of queries with remote keys up to which they attend apart, if keys travel in one exchange before attention:
# a second attention leaves the GPU unfilled at its ends, but the other queries' keys need not be copied.
FEW_QUERIES = 0.125


@dataclass(frozen=True)
class Machine:
    """`latency`: seconds that an exchange takes besides its bytes; `overlaps`: whether attention runs meanwhile."""

    name: str
    flops: float
    bandwidth: float
    memory: float
    latency: float
    overlaps: bool = True


# The constants of H100s with NVLink fit times of two on one host (experiments/results/distributed); the constants of
# several hosts are guesses from specifications (InfiniBand 50 GB/s).
H100 = Machine("H100s with NVLink", flops=400e12, bandwidth=300e9, memory=2.5e12, latency=40e-6)
H100_HOSTS = replace(H100, name="hosts of 8 H100s, InfiniBand", bandwidth=45e9, overlaps=False)  # by collectives
_ONE_HOST = 8
LSE_BYTES = 4
BACKWARD_FLOPS, BACKWARD_BYTES = 2.5, 1.0  # of a backward pass, relative to the forward pass
# How often bytes are read or written besides attention and exchanges, forward and backward, fitted to times of two
# H100s: queries of a rank, for each partial result; travelling queries, and those they are merged with; all tokens, if
# heads travel.
_PARTIAL_PASSES, _QUERY_PASSES, _HEADS_PASSES = 16, 45, 10


def default_machine(ranks: int) -> Machine:
    """The machine that the model assumes for this number of ranks: one host, or several with 400 Gbit/s a GPU."""
    return H100 if ranks <= _ONE_HOST else H100_HOSTS


@dataclass(frozen=True)
class Shape:
    """The sizes of a call, all ranks together."""

    batch: int
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    dtype: torch.dtype

    @property
    def key_bytes(self) -> int:
        return (self.dim + self.v_dim) * self.dtype.itemsize

    @property
    def flops_per_score(self) -> float:
        """Operations of a live score of the mask's mean head, forward and backward, over batch and heads."""
        return 2.0 * (self.dim + self.v_dim) * self.batch * self.heads * (1 + BACKWARD_FLOPS)


@dataclass(frozen=True, eq=False)
class Loads:
    """Live tiles of each rank, in scores, averaged over heads and batch elements: float64 `[ranks]` each."""

    local: Floats
    remote: Floats
    waiting: Floats  # of queries that have remote keys, with their local tiles
    of_pattern: Floats  # [P], of all ranks

    @classmethod
    def of(cls, mask: BlockMask, assignment: Assignment, readers: Readers) -> Loads:
        row_blocks, patterns = mask.blocks[0], pattern_count(mask)
        counts = np.diff(mask.indptr.numpy())
        rank = np.tile(assignment.queries.rank_of_block(mask.block_q), patterns).repeat(counts)
        remote = readers.owner[mask.indices.numpy()] != rank
        row = np.arange(len(counts)).repeat(counts)
        waits = np.zeros(len(counts), np.bool_)
        waits[row[remote]] = True
        share = shares_of_tiles(mask, counts)
        local, far, waiting = (
            np.bincount(rank, some if share is None else some * share, minlength=readers.ranks).astype(np.float64)
            for some in (~remote, remote, waits[row])
        )
        tile = mask.block_q * mask.block_k
        of_pattern = counts.reshape(patterns, row_blocks).sum(1).astype(np.float64)
        return cls(local * tile, far * tile, waiting * tile, of_pattern * tile)

    @property
    def total(self) -> Floats:
        return self.local + self.remote

    @property
    def balance(self) -> float:
        """Mean over largest number of live tiles of a rank: 1 is perfect."""
        return float(self.total.mean() / self.total.max()) if self.total.max() else 1.0


@dataclass(frozen=True, eq=False)
class Traffic:
    """Keys that travel: pairs of a token and a key head, that each rank sends and receives; int64 `[ranks]` each."""

    sent: Integers
    received: Integers

    @classmethod
    def of(cls, readers: Readers, heads: Heads) -> Traffic:
        sent, received = np.zeros(readers.ranks, np.int64), np.zeros(readers.ranks, np.int64)
        for rank in range(readers.ranks):
            rows = readers.rows_of(rank, heads) * (readers.owner != rank)
            received[rank] = rows.sum()
            sent += np.bincount(readers.owner, rows, minlength=readers.ranks).astype(np.int64)
        return cls(sent, received)

    @cached_property
    def busiest(self) -> Integers:
        return np.maximum(self.sent, self.received)


@dataclass(frozen=True)
class Estimate:
    """Bytes are of one forward pass; seconds of forward and backward."""

    strategy: str
    stages: int
    mean_bytes: float  # sent by a rank, on average
    most_bytes: float  # sent or received by the busiest rank
    compute: float
    transfer: float
    total: float

    def __str__(self) -> str:
        return f"keys, {self.stages} st." if self.strategy == "keys" else self.strategy

    @property
    def hidden(self) -> float:
        """The share of the transfer that overlaps with computation."""
        return 1.0 if self.transfer == 0 else max(0.0, min(1.0, 1 - (self.total - self.compute) / self.transfer))


def keys_travel(
    loads: Loads, traffic: Traffic, q_tokens: Integers, k_tokens: Integers, shape: Shape, stages: int, machine: Machine
) -> Estimate:
    """Each rank receives the live remote keys in this many stages; 0: before attention begins."""
    passes, rate = 1 + BACKWARD_BYTES, shape.flops_per_score / machine.flops
    backward = rate * BACKWARD_FLOPS / (1 + BACKWARD_FLOPS)
    sent = traffic.sent * shape.key_bytes
    most = traffic.busiest * shape.key_bytes
    if not most.any():
        compute = float((loads.total * rate).max())
        return Estimate("keys", 0, 0.0, 0.0, compute, 0.0, compute)
    parts = max(stages, 1)
    each = passes * (most / parts / machine.bandwidth + machine.latency)
    if stages == 0:
        share = loads.waiting / np.maximum(loads.total, 1.0)
        copying = 2 * passes * share * k_tokens * shape.batch * shape.kv_heads * shape.key_bytes / machine.memory
        busy, finished = loads.total * rate + copying, loads.total * rate + copying + each
        # Gradients of remote keys are sent after the attention to them. Then come the queries without remote keys, if
        # they attend apart.
        first = np.where(share > FEW_QUERIES, loads.total, loads.waiting)
        finished = finished + _waited(first, loads.total - first) * backward
    else:
        result = q_tokens * shape.batch * shape.heads * shape.v_dim * shape.dtype.itemsize
        merging = _PARTIAL_PASSES * result / machine.memory
        busy, finished = loads.total * rate + (stages + 1) * merging, loads.local * rate + merging
        for stage in range(1, stages + 1):
            finished = np.maximum(finished, stage * each) + loads.remote * rate / stages + merging
        finished = finished + _waited(loads.remote, loads.local) * backward
    if not machine.overlaps:
        finished = busy + parts * each
    return Estimate(
        "keys", stages, float(sent.mean()), float(most.max()), float(busy.max()), float(each.max()) * parts,
        float(finished.max()),
    )  # fmt: skip


def _waited(before: Floats, after: Floats) -> float:
    """The time that ranks wait for each other in a backward pass."""
    return float(before.max() + after.max() - (before + after).max())


def queries_travel(loads: Loads, traffic: Traffic, tokens: Integers, shape: Shape, machine: Machine) -> Estimate:
    """Each rank receives the queries that have live scores with its keys, and sends partial results back.

    `loads`, `traffic`: of the transposed mask; `tokens`: queries of each rank.
    """
    passes, rate, item = 1 + BACKWARD_BYTES, shape.flops_per_score / machine.flops, shape.dtype.itemsize
    result = shape.v_dim * item + LSE_BYTES
    sent = traffic.sent * shape.dim * item + traffic.received * result
    most = np.maximum(sent, traffic.received * shape.dim * item + traffic.sent * result)
    there = passes * (traffic.busiest * shape.dim * item / machine.bandwidth + machine.latency)
    back = passes * (traffic.busiest * result / machine.bandwidth + machine.latency)
    rows = tokens * shape.batch * shape.heads + traffic.sent
    merging = _QUERY_PASSES * rows * shape.v_dim * item / machine.memory
    local = loads.local * rate
    begun = np.maximum(local, there) if machine.overlaps else local + there
    finished = begun + loads.remote * rate + back + merging
    compute = float((loads.total * rate + merging).max())
    return Estimate(
        "queries", 1, float(sent.mean()), float(most.max()), compute, float((there + back).max()),
        float(finished.max()),
    )  # fmt: skip


def heads_travel(
    loads: Loads, pattern: NDArray[np.int32], q_tokens: Integers, k_tokens: Integers, shape: Shape, machine: Machine
) -> Estimate:
    """Each rank receives all tokens of some heads, and sends the outputs back (Ulysses)."""
    ranks = len(q_tokens)
    passes = 1 + BACKWARD_BYTES
    share = shape.batch / ranks
    q, k = q_tokens * share * shape.heads, k_tokens * share * shape.kv_heads
    out_q, out_k = (q.sum() - q), (k.sum() - k)
    item = shape.dtype.itemsize
    sent = ((ranks - 1) * q * shape.dim + out_q * shape.v_dim) * item + (ranks - 1) * k * shape.key_bytes
    received = (out_q * shape.dim + (ranks - 1) * q * shape.v_dim) * item + out_k * shape.key_bytes
    most = np.maximum(sent, received)
    transfer = float(passes * (most.max() / machine.bandwidth + 2 * machine.latency))
    columns = pattern.shape[1]
    of_head = loads.of_pattern[pattern].mean(0)  # [Hq or 1]
    per_rank = of_head.reshape(ranks, -1).sum(1) / columns if columns > 1 else np.full(ranks, of_head[0] / ranks)
    copying = _HEADS_PASSES * float((q * (shape.dim + shape.v_dim) * item + k * shape.key_bytes).max()) * ranks
    compute = float(per_rank.max()) * shape.flops_per_score / machine.flops + copying / machine.memory
    return Estimate("heads", 1, float(sent.mean()), float(most.max()), compute, transfer, compute + transfer)
