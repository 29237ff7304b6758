"""The implementations that are measured, one file each.

A peer takes the case, its pattern and our inputs, and returns a `Runner`, or raises `Unavailable`. Other exceptions are
reported as its failure.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from experiments.benchmarks.harness import chosen, separated
from experiments.benchmarks.speed.cases import Case
from experiments.benchmarks.speed.patterns import Pattern
from experiments.benchmarks.speed.peers.cudnn_block_sparse import cudnn_sparse
from experiments.benchmarks.speed.peers.flashattention4 import fa4, fa4_deterministic
from experiments.benchmarks.speed.peers.flexattention import flex
from experiments.benchmarks.speed.peers.library import ours, reference, varlen
from experiments.benchmarks.speed.peers.runner import Inputs, Peer, Runner
from experiments.benchmarks.speed.peers.scaled_dot_product import SDPBackend, sdpa, with_backend

PEERS: dict[str, Peer] = {
    "flex": flex,
    "flex-autotune": partial(flex, mode="max-autotune-no-cudagraphs"),
    "fa4": fa4,
    "fa4-deterministic": fa4_deterministic,
    "sdpa-fa2": partial(with_backend, backend=SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": partial(with_backend, backend=SDPBackend.CUDNN_ATTENTION),
    "cudnn-sparse": cudnn_sparse,
    "sdpa": sdpa,
    "sparseflash-hopper": partial(ours, backend="hopper"),
    "sparseflash-portable": partial(ours, backend="triton"),
    "sparseflash-varlen": varlen,
    "reference": reference,
}
DEFAULT_PEERS = {
    "cuda": ("flex", "fa4", "sdpa-fa2", "sdpa-cudnn", "sdpa", "sparseflash-varlen"),
    "cpu": ("sdpa", "reference"),
}


def runner_of(name: str, case: Case, live: Pattern, inputs: Inputs) -> Runner:
    return PEERS.get(name, ours)(case, live, inputs)


def named(text: str, offered: Iterable[str] = PEERS) -> tuple[str, ...]:
    names = separated(text)
    return () if names in ([], ["none"]) else tuple(chosen("--peers", names, offered))


__all__ = ["DEFAULT_PEERS", "PEERS", "named", "ours", "runner_of"]
