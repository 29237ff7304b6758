"""The cases that are measured: one `Case` for each line of the tables, in groups that each answer one question."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatch

import torch

FORWARD, BACKWARD, BOTH = "forward", "backward", "both"
CALL, MEMORY = "call", "memory"
FIRST_FORWARD, FIRST_BACKWARD = "first forward", "first backward"
WAYS = (FORWARD, BACKWARD, BOTH)
FIRST = (FIRST_FORWARD, FIRST_BACKWARD)
# A backward runs five matrix products of the same size as the forward's two.
FLOPS_OF_PASS = {FORWARD: 1.0, BACKWARD: 2.5, BOTH: 3.5, CALL: 1.0}

# The question that each group answers, and its minutes on one H100 with every peer, mostly spent compiling the peers.
GROUPS = {
    "calls": "Host time of one inference call at 256 tokens, and the first call of a new process (2 minutes)",
    "masks": "All masks at 16384 tokens: is time in proportion to density? (4 minutes)",
    "memory": "Peak memory of forward and backward up to 1M tokens: is it linear? (1 minute)",
    "lengths": "512 to 1M tokens under local, butterfly and dense masks (3 minutes)",
    "shapes": "The shapes of Long Range Arena, Path-X and Path-256 (4 minutes)",
    "blocks": "Mask blocks of 128, 64, 32 and 16: what does a live score cost? (3 minutes)",
    "dims": "Head dims 32, 64, 96, 128 and 256 (4 minutes)",
    "dtypes": "bf16, fp16, fp32 and fp32 in TF32 (3 minutes)",
    "heads": "Grouped and multi-query heads (3 minutes)",
    "windows": "Element windows, where FlexAttention asks a mask_mod (2 minutes)",
    "tuned": "FlexAttention under max-autotune beside its default (4 minutes)",
}


@dataclass(frozen=True)
class Case:
    """q of shape [batch, heads, length, head_dim] under the mask `kind` of patterns.py; k and v have `kv_heads` heads.

    `passes`: FORWARD (without gradients), BACKWARD, BOTH (one call of each), CALL (host time of an inference call),
    MEMORY (peak of one BOTH), FIRST (the first calls of a new process). `main`: one of the cases of `--quick`.
    """

    name: str
    kind: str
    batch: int
    heads: int
    length: int  # tokens
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    passes: tuple[str, ...] = WAYS
    block: int = 128  # tokens
    main: bool = False
    group: str = "masks"
    kv_heads: int | None = None  # None: as many as `heads`
    tf32: bool = False  # matrix products of fp32 in TF32
    tuned: bool = False  # also time FlexAttention under max-autotune

    @property
    def heads_of_keys(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def arithmetic(self) -> str:
        """The dtype, or tf32."""
        return "tf32" if self.tf32 else str(self.dtype).removeprefix("torch.")

    @property
    def path(self) -> str:
        """The case in names of measurements: its mask in the groups masks, windows and blocks, otherwise its name."""
        if self.group in ("masks", "windows"):
            return f"{self.kind}/{self.head_dim}"
        if self.group == "blocks":
            block = self.name.partition("-")[0].removeprefix("block")  # which a shrunk case keeps
            return f"blocks-of-{block}/{self.kind}/{self.head_dim}"
        return f"{self.name}/{self.head_dim}"

    @property
    def settings(self) -> dict[str, object]:
        """What a reader needs to repeat the case."""
        return {
            "mask": self.kind, "batch": self.batch, "heads": self.heads, "kv_heads": self.heads_of_keys,
            "tokens": self.length, "head_dim": self.head_dim, "dtype": self.arithmetic, "block": self.block,
        }  # fmt: skip

    def shrunk(self, length: int, block: int) -> Case:
        """The same case with one sequence of `length` tokens, two heads and mask blocks of `block` tokens."""
        grouped = self.heads_of_keys < self.heads
        return replace(self, batch=1, heads=2, kv_heads=1 if grouped else None, length=length, block=block)


def useful_flops(case: Case, kept: int, direction: str) -> float:
    """4 * D * kept scores * heads * batch forward, 2.5 times that backward. Dead scores do not count."""
    return 4.0 * case.head_dim * kept * case.heads * case.batch * FLOPS_OF_PASS[direction]


MAIN = ("dense", "butterfly", "local", "bigbird", "random12", "causal")


def _masks(head_dim: int, heads: int) -> list[Case]:
    kinds = (*MAIN, "random03", "random50", "neighborhood")
    return [Case(f"d{head_dim}-{kind}", kind, 1, heads, 16384, head_dim, main=kind in MAIN) for kind in kinds]


def _windows(head_dim: int, heads: int) -> list[Case]:
    return [
        Case(f"d{head_dim}-{kind}", kind, 1, heads, 16384, head_dim, group="windows")
        for kind in ("window256", "window64")
    ]


def _calls() -> list[Case]:
    kinds = ("dense", "causal", "butterfly")
    calls = [Case(f"call-{kind}", kind, 1, 8, 256, 64, passes=(CALL,), group="calls") for kind in kinds]
    first = [
        Case(f"first-d{head_dim}", "butterfly", 1, 8, 1024, head_dim, passes=FIRST, group="calls")
        for head_dim in (64, 128)
    ]
    return calls + first


def _memory() -> list[Case]:
    names = {16384: "16k", 65536: "64k", 262144: "256k", 1048576: "1m"}
    return [
        Case(f"memory-{name}-{kind}", kind, 1, 8, length, 64, passes=(MEMORY,), group="memory")
        for kind in ("local", "butterfly")
        for length, name in names.items()
    ]


def _lengths() -> list[Case]:
    names = {512: "512", 1024: "1k", 4096: "4k", 16384: "16k", 65536: "64k", 262144: "256k", 1048576: "1m"}
    return [
        # At least 32768 tokens in all, so that short sequences fill the GPU, too.
        Case(f"n{name}-{kind}", kind, max(1, 32768 // length), 8, length, 64, group="lengths")
        for length, name in names.items()
        for kind in ("local", "butterfly", "dense")
        if kind != "dense" or length <= 65536  # dense attention over a million tokens would take 20 s per call
    ]


def _shapes() -> list[Case]:
    shapes = {  # batch, heads, length, head dim, masks
        "pathx-d64": (16, 4, 16384, 64, ("butterfly", "neighborhood", "dense")),
        "path256": (2, 4, 65536, 64, ("butterfly", "neighborhood")),
        "pathx-d32": (16, 4, 16384, 32, ("butterfly",)),
        "lra1k": (64, 8, 1024, 64, ("butterfly", "dense")),  # Image, Pathfinder
        "lra2k": (32, 8, 2048, 64, ("butterfly", "dense")),  # ListOps
        "lra4k": (32, 8, 4096, 64, ("butterfly", "dense")),  # Text, Retrieval
    }
    return [
        Case(f"{name}-{kind}", kind, *shape, group="shapes")
        for name, (*shape, kinds) in shapes.items()
        for kind in kinds
    ]


def _dtypes() -> list[Case]:
    arithmetics = {
        "fp32": (torch.float32, False),
        "tf32": (torch.float32, True),
        "fp16": (torch.float16, False),
        "bf16": (torch.bfloat16, False),
    }
    return [
        Case(f"{name}-{kind}", kind, 1, 16, 8192, 64, dtype=dtype, tf32=tf32, group="dtypes")
        for kind in ("butterfly", "dense")
        for name, (dtype, tf32) in arithmetics.items()
    ]


def _blocks() -> list[Case]:
    return [
        Case(f"block{block}-d{head_dim}-{kind}", kind, 1, heads, 16384, head_dim, block=block, group="blocks")
        for head_dim, heads in ((64, 32), (128, 16))
        for kind in ("butterfly", "random12")
        for block in (128, 64, 32, 16)
    ]


def _dims() -> list[Case]:
    return [
        Case(f"dim{head_dim}-{kind}", kind, 1, 16, 16384, head_dim, group="dims")
        for head_dim in (32, 64, 96, 128, 256)
        for kind in ("butterfly", "dense")
    ]


def _heads() -> list[Case]:
    return [
        Case(
            f"kv{kv_heads}of{heads}-d{head_dim}-{kind}",
            kind,
            1,
            heads,
            16384,
            head_dim,
            kv_heads=kv_heads,
            group="heads",
        )
        for head_dim, heads, counts in ((64, 32, (32, 8, 1)), (128, 16, (4,)))
        for kv_heads in counts
        for kind in ("butterfly", "causal")
    ]


def _tuned() -> list[Case]:
    # Masks of one shape whose blocks are all full share the tuned kernel, so three cost little more than one.
    return [
        Case(f"tuned-d{head_dim}-{kind}", kind, 1, heads, 16384, head_dim, group="tuned", tuned=True)
        for head_dim, heads in ((64, 32), (128, 16))
        for kind in ("butterfly", "bigbird", "random12")
    ]


# Calls come first, while torch.compile has few guards, as for a user with one mask.
CASES: tuple[Case, ...] = (
    *_calls(),
    *_masks(128, 16),
    *_masks(64, 32),
    *_memory(),
    *_lengths(),
    *_shapes(),
    *_blocks(),
    *_dims(),
    *_dtypes(),
    *_heads(),
    *_windows(128, 16),
    *_windows(64, 32),
    *_tuned(),
)


def select(patterns: str, *, groups: tuple[str, ...] = (), quick: bool = False) -> list[Case]:
    """The cases of `groups` (all if empty) whose name matches one of the comma-separated globs; with `quick`
    the main ones only, without the pass BOTH."""
    unknown = [name for name in groups if name not in GROUPS]
    if unknown:
        raise ValueError(f"--group must be from {', '.join(GROUPS)}; got {', '.join(unknown)}.")
    globs = [glob.strip() for glob in patterns.split(",")]
    offered = [case for case in CASES if (case.main or not quick) and (not groups or case.group in groups)]
    chosen = [case for case in offered if any(fnmatch(case.name, glob) for glob in globs)]
    if not chosen:
        names = (
            ", ".join(case.name for case in offered) or "the cases of the groups that --quick leaves, which are none"
        )
        raise ValueError(f"--cases must match at least one of {names}; got {patterns!r}.")
    return [replace(case, passes=(FORWARD, BACKWARD)) for case in chosen] if quick else chosen
