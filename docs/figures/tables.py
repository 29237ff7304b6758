"""The tables and sentences of the pages, as data: which figure stands in which cell.

A cell is a request as in a page (`store.figure`). The values beside the labels replace its `{row}` and `{column}`. If
`cell` is empty, the column is the request.
"""

from __future__ import annotations

from collections.abc import Callable

from docs.figures import versions
from docs.figures.table import Table

_SIX = {"dense": "dense", "causal": "causal", "butterfly, 6.25 %": "butterfly", "local, 6.9 %": "local",
        "random, 12.9 %": "random12", "bigbird, 7.6 %": "bigbird"}  # fmt: skip
_PASSES = {"D=128 forward": "128/forward", "D=128 backward": "128/backward",
           "D=64 forward": "64/forward", "D=64 backward": "64/backward"}  # fmt: skip
_BOTH = {"forward": "forward", "forward and backward": "both"}
_CHANGES = {"learned sink": "sink", "ALiBi, fixed": "fixed_alibi", "ALiBi, learned": "alibi", "soft cap": "softcap",
            "T5's table": "table", "biases of keys": "key_bias", "biases of pairs": "bias",
            "biases of live tiles": "tile_bias", "a function": "function"}  # fmt: skip
_ONE_GPU = "Each figure is the time on one GPU divided by the time on two: 2.00 is twice as fast."
_THEIRS = "Each figure is the other library's time divided by sparseflash's: above 1 sparseflash is faster."


def _speed(peer: str, masks: dict[str, str] = _SIX) -> Table:
    """A peer's time divided by our time: masks by passes."""
    names = "speed/{row}/{column}/"
    return Table(masks, _PASSES, f"{names}{peer} / {names}sparseflash", "mask, live scores", "none", _THEIRS)


def _over(first: str, second: str, file: str = "") -> str:
    """The request of the first figure over the second, of a file."""
    return f"{first} / {second}" + (f" @ {file}" if file else "")


def _two_gpus(heads: str, file: str, *ways: str) -> dict[str, str]:
    """Columns: the time of one GPU divided by the time of two, by way and pass."""
    name = f"distributed/{{row}}/{heads}"
    return {
        f"{way}, {label}": _over(f"{name}/{passed}/one-gpu", f"{name}/{passed}/{way}", file)
        for way in ways
        for label, passed in _BOTH.items()
    }


def _decode(form: str, peer: str) -> str:
    return _over(f"decode/{{row}}/{form}/{peer}", f"decode/{{row}}/{form}/sparseflash")


_LAYERS = "layer/{row}/{column}/step"
_GENERATE = "generate/{row}/{column}"
_TRANSFORMERS = "huggingface/{row}"
_CHOSEN = {"65,536 tokens, 64 query heads, 4 key heads": "65536-heads64of4-causal-16x128-a-block",
           "16,384 tokens, 16 heads": "16384-heads16of16-causal-16x128-a-block"}  # fmt: skip


_KNOWING = [(label, peer, passed) for label, peer in (("FlashAttention-4", "fa4"), ("FlexAttention", "flex"))
            for passed in ("forward", "both")]  # fmt: skip


def _selection(passed: str, part: str, peer: str, ours: str, file: str = "") -> str:
    return _over(f"selection/{{row}}/known/{passed}/{peer}", f"selection/{{row}}/{part}/{passed}/{ours}", file)


TABLES = {
    "speed-beside-fa4": _speed("fa4"),
    "speed-beside-fa4-together": Table(  # the sum of the two passes
        _SIX,
        {f"D={dim}": _over(*(" + ".join(f"speed/{{row}}/{dim}/{passed}/{way}" for passed in ("forward", "backward"))
                             for way in ("fa4", "sparseflash")))
         for dim in (128, 64)},
        "", "forward + backward", note=_THEIRS,
    ),
    "speed-beside-fa4-deterministic": _speed("fa4-deterministic", {"dense": "dense", "causal": "causal"}),
    "windows-beside-fa4": Table(
        {f"{keys} keys on each side, D={dim}": f"window{keys}/{dim}" for keys in (256, 64) for dim in (128, 64)},
        {f"{label}, {passed}": _over(f"speed/{{row}}/{passed_as}/{peer}", f"speed/{{row}}/{passed_as}/sparseflash",
                                     "h200-windows")
         for label, peer in (("FlashAttention-4", "fa4"), ("deterministic", "fa4-deterministic"))
         for passed, passed_as in (("forward", "forward"), ("backward", "backward"), ("together", "both"))},
        "", "window", note=_THEIRS,
    ),
    "speed-beside-flex": _speed("flex"),
    "speed-beside-cudnn": _speed("sdpa-cudnn", {"dense": "dense", "causal": "causal"}),
    "speed-tflops": Table(  # useful ones: dead scores count nothing
        {"sparseflash": "sparseflash", "FlashAttention-4": "fa4", "FlexAttention": "flex", "cuDNN": "sdpa-cudnn"}, _SIX,
        "speed/{column}/128/forward/{row} in TFLOP/s", "TFLOP/s, D=128, forward", "none", units=False,
    ),
    "blocks-beside-cudnn": Table(
        {f"{kind}, blocks of {size}": f"blocks-of-{size}/{name}" for size in (64, 128)
         for kind, name in (("butterfly", "butterfly"), ("random, 12.9 %", "random12"))},
        _PASSES, "speed/{row}/{column}/cudnn-sparse / speed/{row}/{column}/sparseflash @ h200-block-sparse-peers",
        "mask", "none", f"{_THEIRS} none: cuDNN's block-sparse backward takes D=128 only.",
    ),
    "layer": Table(
        {"dense": "dense", "causal": "causal", "butterfly": "butterfly", "local": "local"},
        {"D=128": "128", "D=64": "64"}, _over(f"{_LAYERS}/fa4", f"{_LAYERS}/sparseflash"),
        "a training step of one layer",
        note=_THEIRS,
    ),
    "scores": Table(
        _CHANGES, {f"D={dim} {label}": f"{dim}/{{row}}/{name}" for dim in (128, 64) for label, name in _BOTH.items()},
        "scores/{column}/sparseflash / scores/{column}/sparseflash-plain", "score modification",
        note="Each figure is the time with the modification divided by the time without: 1.00 costs nothing.",
        bold=False,
    ),
    "scores-beside-flex": Table(
        {"plain": "plain", **{label: name for label, name in _CHANGES.items() if name != "sink"}}, _BOTH,
        "scores/128/{row}/{column}/flex / scores/128/{row}/{column}/sparseflash @ h200-flex", "score modification",
        note=_THEIRS,
    ),
    "calls": Table(
        {"a call without gradients": "inference", "forward and backward": "forward-and-backward",
         "new lengths and a call": "new-lengths-and-a-call"},
        {"sparseflash": "sparseflash", "SDPA": "sdpa", "FlexAttention": "flex"},
        "calls/{row}/{column} @ h200-flex", "host time in µs", units=False,
    ),
    "decode": Table(
        {"1 of 65,536 tokens": "1x65536-heads32of8-new1", "8 of 65,536": "8x65536-heads32of8-new1",
         "64 of 65,536": "64x65536-heads32of8-new1", "16 of 8,192": "16x8192-heads32of8-new1"},
        {"SDPA, contiguous": _decode("contiguous", "sdpa"),
         "FlashInfer, contiguous": _decode("contiguous", "flashinfer"),
         "FlashInfer, pages of 16": _decode("pages-of-16", "flashinfer"),
         "FlashInfer, pages of 64": _decode("pages-of-64", "flashinfer")},
        "", "caches", "none", f"{_THEIRS} none: this FlashInfer kernel takes one sequence.",
    ),
    "generate": Table(
        {f"{batch} of {tokens:,} tokens": f"{batch}x{tokens}"
         for batch, tokens in ((1, 4096), (1, 16384), (1, 65536), (8, 4096), (8, 16384))},
        {"static caches": "static-cache", "dynamic caches": "dynamic-cache"},
        _over(f"{_GENERATE}/sdpa", f"{_GENERATE}/sparseflash"), "prompts", "none",
        "Each figure is the time of a token with SDPA divided by sparseflash's: above 1 sparseflash is faster. "
        "The noise is largest in the last cell.",
    ),
    "transformers": Table(
        {"GPT-2, 16,384 tokens": "gpt2", "Gemma 2, 8,192 tokens": "gemma2", "gpt-oss, 8,192 tokens": "gpt-oss",
         "T5, 8 x 2,048 tokens": "t5", "Swin, 64 images": "swin"},
        {f"{label}, {passed}": _over(f"{_TRANSFORMERS}/{way}/{peer}", f"{_TRANSFORMERS}/{way}/sparseflash")
         for label, peer in (("SDPA", "sdpa"), ("FlashAttention-4", "fa4"), ("FlexAttention", "flex"))
         for passed, way in (("forward", "forward"), ("training step", "training-step"))},
        "", "model", "none",
        f"{_THEIRS} none: not supported in this model, or not run. The noise is largest in Swin's step.",
    ),
    "chosen": Table(
        _CHOSEN,
        {f"{label}, {passed}": _selection(passed, "known", peer, "sparseflash") for label, peer, passed in _KNOWING},
        "", "blocks known beforehand to all", "none", _THEIRS,
    ),
    "chosen-by-us": Table(
        _CHOSEN,
        {f"{label}, {passed}": _selection(passed, "chosen", peer, "sparseflash-recorded")
         for label, peer, passed in _KNOWING},
        "", "blocks chosen by sparseflash at every step, known to the others", "none", _THEIRS,
    ),
    "distributed": Table(
        {"causal": "causal", "a window of 4,096 keys": "window-4096",
         "this window and the first 64 keys": "window-4096-and-64-sinks",
         "documents": "documents", "butterfly": "butterfly", "BigBird": "bigbird"},
        _two_gpus("heads32of8", "h200x2", "auto", "all-gather"), "", "32 query heads, 8 key heads", note=_ONE_GPU,
    ),
    "distributed-16-heads": Table(
        {"a window of 4,096 keys": "window-4096", "this window and the first 64 keys": "window-4096-and-64-sinks",
         "documents": "documents", "butterfly": "butterfly", "BigBird": "bigbird"},
        _two_gpus("heads16of16", "h200x2-16-heads", "auto"), "", "16 heads", note=_ONE_GPU,
    ),
    "distributed-dense": Table(
        {"dense": "dense", "causal": "causal"},
        _two_gpus("heads16of16", "h200x2-context-parallel", "auto", "context-parallel"), "", "16 heads", note=_ONE_GPU,
    ),
    "lra-speed": Table(
        {"SDPA, dense": "sdpa", "sparseflash, dense": "dense", "sparseflash, `butterfly`": "butterfly",
         "sparseflash, `local`": "local"},
        {"steps in the time of one with standard attention": "mean-of-5-tasks"}, "lra/{column}/speed/{row}",
        "attention", note="Geometric mean of five tasks: above 1 is faster than standard attention.", units=False,
    ),
    "lra-accuracies": Table(
        {"ListOps, 3.4 million parameters, 1.9 minutes": "listops/accuracy/listops-modern",
         "ListOps, 0.2 million parameters (the Nystromformer's sizes), 100,000 steps":
             "listops/accuracy/listops-nystromformer-100000",
         "Pathfinder-32, easier paths first, 4 minutes": "pathfinder32/accuracy/pf32-modern-hard",
         "Pathfinder-32, with pixel labels in training, unequal steps": "pathfinder32/accuracy/pf32-modern-labels"},
        {"dense": "dense", "butterfly": "butterfly", "local": "local"}, "lra/{row}/{column}", "task", "not run",
        "Accuracy on the test split, one run each.",
    ),
    "pathx": Table(
        {"labels alone, block-sparse": "labels-alone/block-sparse", "labels alone, dense": "labels-alone/dense",
         "labels alone, a U-Net": "labels-alone/unet", "pixel labels in training": "pixel-labels/block-sparse"},
        {"Path-X": "path-x", "Path-256": "path-256", "Path-512": "path-512"}, "pathx/{column}/accuracy/{row}",
        "right answers", "not run",
        "± is the standard deviation of five runs (Path-X) or three (Path-256); a figure without ± is one run.",
    ),
    "lm-losses": Table(
        {"16,384 tokens, dense": "16384-dense", "16,384 tokens, `local \\| butterfly`": "16384-local-or-butterfly",
         "16,384 tokens, a window of 1,024": "16384-window", "2,048 tokens, dense": "2048-dense"},
        {"validation loss a token": "loss", "trained on": "tokens", "speed": "speed"}, "lm/10-minutes/{column}/{row}",
        "context, mask", note="One seed.",
    ),
    "recall": Table(
        {"dense": "dense", "shared blocks": "shared-blocks", "MoBA": "moba", "NSA": "nsa", "VSA": "vsa",
         "a window": "window"},
        {"16,384 tokens": "recall/16384/right-answers/{row}", "256 tokens": "recall/256/right-answers/{row}"},
        "", "right answers", note="± is the standard deviation of three runs; a figure without ± is one run.",
    ),
    "exactness": Table(
        {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "TF32 products": "tf32"},
        {"portable kernels": "worst/triton", "Hopper kernels": "worst/hopper",
         "cases, portable": "cases/triton", "cases, Hopper": "cases/hopper"},
        "exactness/{row}/{column}", "largest error / allowed error", "none",
        "At most 1 is within the bound. none: the Hopper kernels take no fp32.", units=False,
    ),
    "triton-versions": Table(
        versions.rows(), {"forward": "forward", "backward": "backward"}, versions.CELL, corner=versions.CORNER,
        note="Speed relative to the first row, over the 12 cases of `speed --quick`.", last=versions.OTHERS,
    ),
}  # fmt: skip
TEXTS: dict[str, Callable[[], str]] = {"triton-versions": versions.sentence}
