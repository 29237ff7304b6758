"""Workloads of models: head dims, shapes, masks and batches that the other groups do not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from experiments.benchmarks.speed.grid import near
from sparseflash import BlockMask, masks

Rule = Callable[[Any, Any, Any, Any], Any]  # (batch, head, query, key) -> live


@dataclass(frozen=True)
class Workload:
    """Attention of q [batch, heads, queries, dim] and keys. sizes: of the mask, as KINDS says."""

    name: str
    kind: str
    queries: int
    heads: int = 16
    dim: int = 128
    batch: int = 1
    sizes: tuple[int, ...] = ()
    keys: int | None = None  # None: as many as queries
    kv_heads: int | None = None  # None: as many as heads
    v_dim: int | None = None  # None: as the head dim
    backward: bool = True

    @property
    def k_len(self) -> int:
        """The number of keys."""
        return self.keys or self.queries

    @property
    def settings(self) -> dict[str, Any]:
        """What a reader needs to repeat the workload."""
        return {
            "mask": self.kind, "sizes": list(self.sizes), "batch": self.batch, "heads": self.heads,
            "kv_heads": self.kv_heads or self.heads, "queries": self.queries, "keys": self.k_len, "head_dim": self.dim,
            "v_dim": self.v_dim or self.dim,
        }  # fmt: skip

    def lengths(self, total: int) -> list[int]:
        """Of `sizes[0]` sequences of very different lengths, at least one token each: of documents their sum is total,
        and padded sequences have at most total.
        """
        shares = np.random.default_rng(0).lognormal(sigma=1.0, size=self.sizes[0])
        whole = shares.sum() if self.kind == "documents" else shares.max()
        found = np.maximum(1, (shares / whole * total).astype(int))
        if self.kind == "documents":
            found[found.argmax()] += total - found.sum()
        return [int(each) for each in found]

    def shrunk(self) -> Workload:
        """A test of the benchmark itself: at most 256 tokens, two heads and small sizes of the mask."""
        small = {"image": (16, 5), "video": (4, 3), "longformer": (64, 2), "documents": (5,), "padded": (2,)}
        sizes = small.get(self.kind, tuple(min(size, 64) for size in self.sizes))
        tokens = {"image": 256, "video": 64}.get(self.kind, 256)
        return replace(
            self, queries=min(self.queries, tokens) if self.keys is None else 64, keys=self.keys and 256, heads=2,
            kv_heads=self.kv_heads and 1, batch=min(self.batch, 2), sizes=sizes,
        )  # fmt: skip


def _dense(w: Workload, device: torch.device) -> tuple[None, None]:
    return None, None


def _causal(w: Workload, device: torch.device) -> tuple[BlockMask, Rule]:
    return masks.causal(w.queries), lambda b, h, q, k: k <= q


def _window(w: Workload, device: torch.device) -> tuple[BlockMask, Rule]:
    (window,) = w.sizes
    return masks.local(w.queries, window=window, causal=True), lambda b, h, q, k: (k <= q) & (k > q - window)


def _prefix(w: Workload, device: torch.device) -> tuple[BlockMask, Rule]:
    (prefix,) = w.sizes
    return masks.prefix_lm(w.queries, prefix=prefix), lambda b, h, q, k: (k < prefix) | (k <= q)


def _longformer(w: Workload, device: torch.device) -> tuple[BlockMask, Rule]:
    window, tokens = w.sizes
    side = window // 2

    def rule(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((k <= q + side) & (q <= k + side)) | (q < tokens) | (k < tokens)

    return masks.longformer(w.queries, window=window, global_tokens=tokens), rule


def _grid(w: Workload, device: torch.device) -> tuple[BlockMask, Rule]:
    """A square image, or a cube of a video: a side and the window on each axis."""
    side, window = w.sizes
    axes = {"image": 2, "video": 3}[w.kind]

    def rule(b: Any, h: Any, q: Any, k: Any) -> Any:
        live = near(q % side, k % side, side, window)
        for _ in range(axes - 1):
            q, k = q // side, k // side
            live = live & near(q % side, k % side, side, window)
        return live

    return masks.neighborhood((side,) * axes, window=window), rule


def _documents(w: Workload, device: torch.device) -> tuple[BlockMask, Rule]:
    lengths = w.lengths(w.queries)
    document = torch.repeat_interleave(torch.tensor(lengths)).to(device)
    return masks.documents(lengths, causal=True), lambda b, h, q, k: (document[q] == document[k]) & (k <= q)


def _padded(w: Workload, device: torch.device) -> tuple[BlockMask, Rule]:
    """Every batch element has a length of its own."""
    lengths = replace(w, sizes=(w.batch,)).lengths(w.queries)
    of_batch = torch.tensor(lengths, device=device)
    mask = BlockMask.dense(w.queries, block=128).with_lengths(lengths)
    return mask, lambda b, h, q, k: (q < of_batch[b]) & (k < of_batch[b])


KINDS: dict[str, Callable[[Workload, torch.device], tuple[BlockMask | None, Rule | None]]] = {
    "dense": _dense,
    "causal": _causal,
    "window": _window,  # keys
    "prefix": _prefix,  # keys that every query sees
    "longformer": _longformer,  # keys, global tokens
    "image": _grid,  # side, window
    "video": _grid,
    "documents": _documents,  # their number
    "padded": _padded,
}
READS_MEMORY = ("documents", "padded")  # rules that FlashAttention-4's mask_mod cannot be

WORKLOADS = (
    Workload("llama-causal-8k", "causal", 8192, 32, 128, 4, kv_heads=8),
    Workload("window-1000-32k", "window", 32768, 32, 128, sizes=(1000,), kv_heads=8),
    Workload("window-4096-64k-d64", "window", 65536, 32, 64, sizes=(4096,)),
    Workload("documents-64k", "documents", 65536, 16, 128, sizes=(32,)),
    Workload("bert-64x512", "dense", 512, 16, 64, 64),
    Workload("gpt2-32x1k", "causal", 1024, 16, 64, 32),
    Workload("causal-16x2k", "causal", 2048, 16, 128, 16),
    Workload("cross-1k-64k", "dense", 1024, 16, 128, keys=65536),
    Workload("cross-128-64k", "dense", 128, 16, 128, 8, keys=65536),
    Workload("window-1024-d96", "window", 16384, 16, 96, sizes=(1024,)),
    *(Workload(f"causal-8k-d{dim}", "causal", 8192, 16, dim) for dim in (32, 64, 80, 96, 128, 192, 256)),
    *(Workload(f"dense-4k-d{dim}", "dense", 4096, 16, dim, 2) for dim in (32, 64, 72, 80, 96, 128, 192, 256)),
    *(Workload(f"window-1024-16k-d{dim}", "window", 16384, 16, dim, sizes=(1024,)) for dim in (64, 128, 256)),
    Workload("deepseek-causal-8k", "causal", 8192, 16, 192, v_dim=128),
    Workload("latent-causal-4k", "causal", 4096, 16, 576, kv_heads=1, v_dim=512, backward=False),
    *(Workload(f"{kind}-16k-d64", kind, 16384, 32, 64) for kind in ("dense", "causal")),
    Workload("image-128-window-13", "image", 16384, 16, 64, sizes=(128, 13)),
    Workload("video-32-window-9", "video", 32768, 16, 64, sizes=(32, 9)),
    Workload("longformer-16k", "longformer", 16384, 16, 64, sizes=(512, 1)),
    Workload("padded-16x4k", "padded", 4096, 16, 64, 16),
    Workload("prefix-8k", "prefix", 8192, 16, 128, sizes=(2048,)),
)
