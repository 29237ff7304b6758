"""`python -m docs.support` rewrites the tables of the page on support (docs/pages/support.md).

They are the library's own choices of kernels for tensors on the meta device, and the arguments of the calls. A test
compares the page with them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from docs.calls import CALLS, FEATURES, NOTHING, REFUSED, SCORES
from sparseflash import BlockMask, masks, scores
from sparseflash.backends.problem import Problem
from sparseflash.backends.triton.dispatch import decide
from sparseflash.backends.triton.family import Request
from sparseflash.backends.triton.hopper import support
from sparseflash.backends.triton.prepared_call import setting_of
from sparseflash.backends.triton.versions import MEASURED
from sparseflash.dropout import Dropout, threshold
from sparseflash.scores.change import Change, Scores
from sparseflash.validation import prepared_scores

PAGE = Path(__file__).with_name("pages") / "support.md"
TABLE = re.compile(r"(<!-- support: (\w+) -->\n).*?(<!-- /support -->)", re.DOTALL)

HEADS, TOKENS = 16, 16_384
GPUS = {(8, 0): "8.0", (8, 6): "8.6", (8, 9): "8.9", (9, 0): "9.0", (10, 0): "10.0", (12, 0): "12.0"}
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
HEAD_DIMS = ((16, 16), (32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))
PASSES = ("forward", "backward")
MASKS = {"mask", "mask by head", "mask by batch"}


def asked(
    mask: BlockMask | None, *, dims: tuple[int, int] = (128, 128), dtype: torch.dtype = torch.bfloat16,
    capability: tuple[int, int] = (9, 0), tokens: int = TOKENS, change: Scores | Change | None = None,
    dropped: bool = False,
) -> tuple[str, str, str]:  # fmt: skip
    """The same answers as `explain`, without its plans: a plan for a mask on a GPU needs the GPU."""
    q, k, v = (torch.empty(1, HEADS, tokens, dim, dtype=dtype, device="meta") for dim in (dims[0], *dims))
    dropout = Dropout(torch.empty(1, dtype=torch.int64, device="meta"), threshold(0.1)) if dropped else None
    problem = Problem.of(mask, scale=1.0, batch=1, dropout=dropout, kernels="")
    changes = prepared_scores(change, q, k, mask, any_device=True)
    changes = changes.without("temperature") if changes else None
    changes = changes if changes and changes.changes else None
    learned = [] if changes is None else [x.requires_grad for x in changes.tensors()]
    setting = setting_of(q, k, problem, capability, torch.device("cpu"))
    decisions = [
        decide(Request.of(setting, q, v, changes, wanted, backward=backward))
        for backward, wanted in ((False, ()), (True, learned))
    ]
    reasons = {reason[0].upper() + reason[1:]: None for each in decisions for reason in each.refusals.values()}
    forward, backward = (named(each.family.name if each.family else None) for each in decisions)
    return forward, backward, "<br>".join(reasons)


@contextmanager
def under(triton: tuple[int, int]) -> Iterator[None]:
    """With the answers of a process with this Triton, whichever is installed, which compiles kernels."""
    with (
        mock.patch.object(support, "triton_version", lambda: triton),
        mock.patch.object(support, "is_interpreted", lambda: False),
    ):
        yield


def asked_of_all(**arguments: Any) -> tuple[str, str, str]:
    """`asked` of every measured Triton: the answers of the oldest, and those that follow."""
    found = {}
    for each in MEASURED:
        with under(each.triton):
            found[each.triton] = asked(**arguments)

    def kernels(number: int) -> str:
        said: list[str] = []
        before = None
        for (major, minor), answer in found.items():
            if answer[number] != before:
                said.append(f"from Triton {major}.{minor} {answer[number]}" if said else answer[number])
            before = answer[number]
        return ", ".join(said)

    reasons = dict.fromkeys(reason for *_, text in found.values() for reason in text.split("<br>") if reason)
    return kernels(0), kernels(1), "<br>".join(reasons)


def named(family: str | None) -> str:
    """A family as the tables write it."""
    return {"hopper": "**Hopper**", "portable": "portable", None: "no"}[family]


def both(forward: str, backward: str) -> str:
    """The kernels of both passes in one cell."""
    return forward if forward == backward else f"forward {forward}, backward {backward}"


def tensor(*shape: int, learned: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without contents."""
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=learned)


def window(tokens: int) -> BlockMask:
    """A causal window of 4,096 keys."""
    return masks.local(tokens, window=4096, causal=True)


def masks_of_rows() -> dict[str, BlockMask | None]:
    """The masks of a table, one of each kind between which kernels are chosen."""
    chosen = torch.arange(16, dtype=torch.int32).expand(1, HEADS, TOKENS // 128, 16)
    return {
        "none: dense": None,
        "`causal(N)`": masks.causal(TOKENS),
        "`local(N, window=4096, causal=True)`": window(TOKENS),
        "`local(N, window=8192, causal=True)`": masks.local(TOKENS, window=8192, causal=True),
        "`butterfly(N)`": masks.butterfly(TOKENS),
        "`per_head(...)`: a pattern for each head": masks.per_head(
            [window(TOKENS), masks.butterfly(TOKENS)] * (HEADS // 2)
        ),
        "`butterfly(N, block=256)`": masks.butterfly(TOKENS, block=256),
        "`butterfly(N, block=64)`": masks.butterfly(TOKENS, block=64),
        "`butterfly(N, block=32)`, or 16": masks.butterfly(TOKENS, block=32),
        "`butterfly(N).with_lengths(...)`": masks.butterfly(TOKENS).with_lengths(torch.tensor([TOKENS - 100])),
        "`from_block_index(...)`, made at every step": BlockMask.from_block_index(chosen, q_len=TOKENS),
    }


def changes_of_rows() -> dict[str, Scores | Change]:
    """The score modifications of a table; tensors are learned where the text says so."""
    slopes, table = tensor(HEADS), tensor(HEADS, 32)
    learned, mask = tensor(HEADS, learned=True), window(TOKENS)
    half = torch.bfloat16
    pairs = tensor(1, HEADS, TOKENS, TOKENS, dtype=half)
    tiles = tensor(1, HEADS, len(mask.indices), 128, 128, dtype=half, learned=True)
    buckets = scores.t5_buckets(32, 128)
    return {
        "`softcap`": scores.softcap(50.0),
        "`sink`, learned": scores.sink(learned),
        "`temperature`, learned": scores.temperature(learned),
        "`alibi`": scores.alibi(slopes),
        "`alibi`, learned": scores.alibi(learned),
        "`alibi` with `softcap`": scores.alibi(slopes) + scores.softcap(50.0),
        "`alibi`, learned, with `softcap`": scores.alibi(learned) + scores.softcap(50.0),
        "`log_decay`": scores.log_decay(slopes),
        "`relative` with `t5_buckets`": scores.relative(table, buckets),
        "`relative` with `t5_buckets`, learned": scores.relative(tensor(HEADS, 32, learned=True), buckets),
        "`relative` with `clipped(200)`, learned": scores.relative(
            tensor(HEADS, 401, learned=True), scores.clipped(200)
        ),
        "`relative_2d`, learned": scores.relative_2d(tensor(HEADS, 255, 255, learned=True), 128, 128),
        "`key_bias`, learned": scores.key_bias(tensor(1, HEADS, TOKENS, learned=True)),
        "`bias`": scores.bias(pairs),
        "`bias`, learned": scores.bias(tensor(1, HEADS, TOKENS, TOKENS, dtype=half, learned=True)),
        "`bias`, learned, shared by the heads": scores.bias(tensor(1, 1, TOKENS, TOKENS, dtype=half, learned=True)),
        "`bias` in fp32": scores.bias(tensor(1, HEADS, TOKENS, TOKENS)),
        "`tile_bias`, learned": scores.tile_bias(tiles, mask),
        "`function`": scores.function(lambda score, b, h, q, k: score - 0.1 * (q - k).abs()),
    }


def rows(*cells: list[str]) -> str:
    """A table of Markdown, its header first."""
    header, *body = (f"| {' | '.join(each)} |" for each in cells)
    return "\n".join([header, "|---" * len(cells[0]) + "|", *body])


def gpus() -> str:
    """Kernels by GPU, dtype and head dim, under a causal mask."""
    mask = masks.causal(TOKENS)
    answers = {
        (gpu, dtype): [asked(mask, dims=dims, dtype=dtype, capability=gpu)[:2] for dims in HEAD_DIMS]
        for gpu in GPUS
        for dtype in DTYPES
    }
    columns: dict[tuple[tuple[str, str], ...], list[tuple[tuple[int, int], torch.dtype]]] = {}
    for where, column in answers.items():
        if any(each != ("portable", "portable") for each in column):
            columns.setdefault(tuple(column), []).append(where)
    names = []
    for places in columns.values():
        alike = {gpu: [DTYPES[dtype] for g, dtype in places if g == gpu] for gpu, _ in places}
        by_dtypes: dict[str, list[str]] = {}
        for gpu, dtypes in alike.items():
            by_dtypes.setdefault(", ".join(dtypes), []).append(GPUS[gpu])
        names.append("; ".join(f"{', '.join(found)}: {dtypes}" for dtypes, found in by_dtypes.items()))
    body = []
    for number, (dim, v_dim) in enumerate(HEAD_DIMS):
        name = str(dim) if dim == v_dim else f"{dim}, Dv = {v_dim}"
        body.append([name, *(both(*column[number]) for column in columns)])
    return rows(["D", *names], *body)


def by_mask() -> str:
    """Kernels on compute capability 9.0 by mask and head dim."""
    return by_row({name: {"mask": mask} for name, mask in masks_of_rows().items()}, "mask")


def by_change() -> str:
    """Kernels on compute capability 9.0 by score modification and head dim, under a causal window."""
    mask = window(TOKENS)
    options = {name: {"mask": mask, "change": change} for name, change in changes_of_rows().items()}
    return by_row({**options, "dropout": {"mask": mask, "dropped": True}}, "score modification")


def by_row(options: dict[str, dict[str, Any]], title: str) -> str:
    """A table with a row for each set of arguments of `explain`."""
    body = []
    for name, arguments in options.items():
        found = [asked_of_all(**arguments, dims=(dim, dim)) for dim in (128, 64)]
        reasons = dict.fromkeys(reason for *_, text in found for reason in text.split("<br>") if reason)
        reasons = [re.sub("^They ", "Hopper kernels ", re.sub("; got .*", "", reason)) for reason in reasons]
        body.append([name, *(kernels for each in found for kernels in each[:2]), "<br>".join(reasons)])
    heading = [f"D=128 {PASSES[0]}", PASSES[1], f"D=64 {PASSES[0]}", PASSES[1]]
    return rows([title, *heading, "why not Hopper"], *body)


def by_call() -> str:
    """What each call does not take. tests/test_calls.py tries every feature with every call."""
    body = [
        [title, without([each for each in FEATURES if {(call, each)} & (REFUSED.keys() | NOTHING.keys())]) or "-"]
        for call, title in CALLS.items()
    ]
    return rows(["call", "does not take"], *body)


def without(features: list[str]) -> str:
    """Features as text, several masks and most score modifications in few words."""
    found = {each: FEATURES[each] for each in features}
    kept = [FEATURES[kind] for kind in SCORES if kind not in found]
    if len(kept) < len(SCORES) / 2:
        found = {each: text for each, text in found.items() if each not in SCORES}
        found["scores"] = "score modifications" + (f" (except {', '.join(kept)})" if kept else "")
    if found.keys() >= MASKS:
        found = {each: text for each, text in found.items() if each not in MASKS} | {"masks": "masks"}
    return ", ".join(found.values())


TABLES: dict[str, Callable[[], str]] = {
    "gpus": gpus, "masks": by_mask, "scores": by_change, "calls": by_call,
}  # fmt: skip


def written(page: str) -> str:
    """Where a table does not name a Triton, its answers hold for the newest."""
    with under(MEASURED[-1].triton):
        return TABLE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", page)


if __name__ == "__main__":
    if sys.argv[1:]:
        raise SystemExit("python -m docs.support takes no arguments")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
