from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import typer

from experiments.benchmarks.harness import chosen, matching

FORWARD, BACKWARD, BOTH, MEMORY = "forward", "backward", "both", "memory"
WAYS = (FORWARD, BACKWARD, BOTH)
# A backward runs five matrix products, a forward two.
FLOPS_OF_PASS = {FORWARD: 1.0, BACKWARD: 2.5, BOTH: 3.5}

# The question of each group, and its minutes on one H100 with every peer.
GROUPS = {
    "masks": "All masks at 16384 tokens: is time in proportion to density? (4 minutes)",
    "memory": "Peak memory of forward and backward up to 1M tokens: is it linear? (1 minute)",
    "blocks": "Mask blocks of 128, 64, 32 and 16: what does a live score cost? (3 minutes)",
    "dtypes": "bf16, fp16, fp32 and fp32 in TF32 (3 minutes)",
    "windows": "Element windows, where FlexAttention asks a mask_mod (2 minutes)",
    "workloads": "Head dims, shapes, masks and batches of models; only if it is named (an hour of an H200)",
}
ON_REQUEST = "workloads"


@dataclass(frozen=True)
class Case:
    """q of shape [batch, heads, length, head_dim] under the mask `kind` of patterns.py; k and v have `kv_heads` heads.

    `sizes`: of the mask, as KINDS in patterns.py says.
    """

    name: str
    kind: str
    batch: int
    heads: int
    length: int  # queries
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    passes: tuple[str, ...] = WAYS
    block: int = 128  # tokens
    group: str = "masks"
    kv_heads: int | None = None  # None: as many as `heads`
    tf32: bool = False  # matrix products of fp32 in TF32
    sizes: tuple[int, ...] = ()
    keys: int | None = None  # None: as many as queries
    v_dim: int | None = None  # None: as the head dim

    @property
    def heads_of_keys(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def k_len(self) -> int:
        return self.keys or self.length

    @property
    def arithmetic(self) -> str:
        return "tf32" if self.tf32 else str(self.dtype).removeprefix("torch.")

    @property
    def path(self) -> str:
        if self.group in ("masks", "windows"):
            return f"{self.kind}/{self.head_dim}"
        if self.group == "blocks":
            block = self.name.partition("-")[0].removeprefix("block")
            return f"blocks-of-{block}/{self.kind}/{self.head_dim}"
        return f"{self.name}/{self.head_dim}"

    @property
    def settings(self) -> dict[str, object]:
        found: dict[str, object] = {
            "mask": self.kind, "batch": self.batch, "heads": self.heads, "kv_heads": self.heads_of_keys,
            "tokens": self.length, "head_dim": self.head_dim, "dtype": self.arithmetic, "block": self.block,
        }  # fmt: skip
        more = {"sizes": list(self.sizes), "keys": self.keys, "v_dim": self.v_dim}
        return found | {name: value for name, value in more.items() if value}

    def shrunk(self, length: int, block: int) -> Case:
        grouped = self.heads_of_keys < self.heads
        small = replace(self, batch=1, heads=2, kv_heads=1 if grouped else None, length=length, block=block)
        if self.group != ON_REQUEST:
            return small
        sizes = {"image": (16, 5), "video": (4, 3), "longformer": (64, 2), "documents": (5,)}.get(
            self.kind, tuple(min(size, 64) for size in self.sizes)
        )
        tokens = {"image": 256, "video": 64}.get(self.kind, length if self.keys is None else length // 4)
        return replace(small, batch=min(self.batch, 2), length=tokens, keys=self.keys and length, sizes=sizes)


def useful_flops(case: Case, kept: float, direction: str) -> float:
    dims = case.head_dim + (case.v_dim or case.head_dim)
    return 2.0 * dims * kept * case.heads * case.batch * FLOPS_OF_PASS[direction]


MASKS = ("dense", "butterfly", "local", "bigbird", "random12", "causal")
ARITHMETICS = {
    "fp32": (torch.float32, False), "tf32": (torch.float32, True), "fp16": (torch.float16, False),
    "bf16": (torch.bfloat16, False),
}  # fmt: skip
D128, D64 = (128, 16), (64, 32)  # head dim and heads


def _workload(
    name: str, kind: str, length: int, heads: int = 16, head_dim: int = 128, batch: int = 1, **more: Any
) -> Case:  # fmt: skip
    given = {"passes": (FORWARD, BACKWARD), "group": ON_REQUEST} | more
    return Case(name, kind, batch, heads, length, head_dim, **given)


WORKLOADS = (
    _workload("llama-causal-8k", "causal", 8192, 32, 128, 4, kv_heads=8),
    _workload("window-1000-32k", "window", 32768, 32, 128, sizes=(1000,), kv_heads=8),
    _workload("window-4096-64k-d64", "window", 65536, 32, 64, sizes=(4096,)),
    _workload("documents-64k", "documents", 65536, 16, 128, sizes=(32,)),
    _workload("bert-64x512", "dense", 512, 16, 64, 64),
    _workload("gpt2-32x1k", "causal", 1024, 16, 64, 32),
    _workload("causal-16x2k", "causal", 2048, 16, 128, 16),
    _workload("cross-1k-64k", "dense", 1024, 16, 128, keys=65536),
    _workload("cross-128-64k", "dense", 128, 16, 128, 8, keys=65536),
    _workload("window-1024-d96", "window", 16384, 16, 96, sizes=(1024,)),
    *(_workload(f"causal-8k-d{dim}", "causal", 8192, 16, dim) for dim in (32, 64, 80, 96, 128, 192, 256)),
    *(_workload(f"dense-4k-d{dim}", "dense", 4096, 16, dim, 2) for dim in (32, 64, 72, 80, 96, 128, 192, 256)),
    *(_workload(f"window-1024-16k-d{dim}", "window", 16384, 16, dim, sizes=(1024,)) for dim in (64, 128, 256)),
    _workload("deepseek-causal-8k", "causal", 8192, 16, 192, v_dim=128),
    *(_workload(f"{kind}-16k-d64", kind, 16384, 32, 64) for kind in ("dense", "causal")),
    _workload("image-128-window-13", "image", 16384, 16, 64, sizes=(128, 13)),
    _workload("video-32-window-9", "video", 32768, 16, 64, sizes=(32, 9)),
    _workload("longformer-16k", "longformer", 16384, 16, 64, sizes=(512, 1)),
    _workload("padded-16x4k", "padded", 4096, 16, 64, 16),
    _workload("prefix-8k", "prefix", 8192, 16, 128, sizes=(2048,)),
)

CASES: tuple[Case, ...] = (
    *(Case(f"d{dim}-{kind}", kind, 1, heads, 16384, dim) for dim, heads in (D128, D64) for kind in MASKS),
    *(
        Case(f"memory-{name}-{kind}", kind, 1, 8, n, 64, passes=(MEMORY,), group="memory")
        for kind in ("local", "butterfly")
        for name, n in (("16k", 1 << 14), ("64k", 1 << 16), ("256k", 1 << 18), ("1m", 1 << 20))
    ),
    *(
        Case(f"block{block}-d{dim}-{kind}", kind, 1, heads, 16384, dim, block=block, group="blocks")
        for dim, heads in (D64, D128)
        for kind in ("butterfly", "random12")
        for block in (128, 64, 32, 16)
    ),
    *(
        Case(f"{name}-{kind}", kind, 1, 16, 8192, 64, dtype=dtype, tf32=tf32, group="dtypes")
        for kind in ("butterfly", "dense")
        for name, (dtype, tf32) in ARITHMETICS.items()
    ),
    *(
        Case(f"d{dim}-{kind}", kind, 1, heads, 16384, dim, group="windows")
        for dim, heads in (D128, D64)
        for kind in ("window256", "window64")
    ),
    *WORKLOADS,
)


def select(patterns: str, *, groups: Sequence[str] = (), quick: bool = False) -> list[Case]:
    """groups: all but workloads if empty. quick: the group masks only, without the pass BOTH."""
    wanted = chosen("--group", groups, GROUPS) if groups else [name for name in GROUPS if name != ON_REQUEST]
    offered = [case for case in CASES if case.group in wanted and (case.group == "masks" or not quick)]
    if not offered:
        raise typer.BadParameter(f"--quick has cases of the group masks alone; got --group {', '.join(wanted)}.")
    found = matching(patterns, offered)
    return [replace(case, passes=(FORWARD, BACKWARD)) for case in found] if quick else found
