"""The tables and sentences of the pages, as data: which figure stands in which cell.

A cell is a request as in a page (`store.figure`). The values beside the labels replace its `{row}` and `{column}`. If
`cell` is empty, the column is the request.
"""

from __future__ import annotations

from collections.abc import Callable

from docs.figures import compiled, versions
from docs.figures.table import Table

_SIX = {"dense": "dense", "causal": "causal", "butterfly, 6.25 %": "butterfly", "local, 6.9 %": "local",
        "random, 12.9 %": "random12", "bigbird, 7.6 %": "bigbird"}  # fmt: skip
_PASSES = {"D=128 forward": "128/forward", "D=128 backward": "128/backward",
           "D=64 forward": "64/forward", "D=64 backward": "64/backward"}  # fmt: skip
_BOTH = {"forward": "forward", "forward and backward": "both"}
_CHANGES = {"`sink`, learned": "sink", "`alibi`, fixed": "fixed_alibi", "`alibi`, learned": "alibi",
            "`softcap`": "softcap", "`relative` (T5's table), learned": "table", "`key_bias`, learned": "key_bias",
            "`bias`, learned": "bias", "`tile_bias`, learned": "tile_bias", "`function`": "function"}  # fmt: skip
_MADE = {"CPU time": "cpu", "peak memory": "peak", "the mask": "size"}
_PACKED = {"`masks.causal`": "causal", "`None`": "dense", "`partial(masks.local, window=65, causal=True)`": "window",
           "a rule": "rule", "a function of the length": "function", "`masks.butterfly`": "butterfly"}  # fmt: skip
_IDEAS = {"`NativeSparseAttention`": "NSA", "`MixtureOfBlocks`": "MoBA", "`BlockSelection`": "MSA",
          "`TokenSelection`": "DSA", "`SpanSelection`": "QSA", "`VideoSparseAttention`": "VSA"}  # fmt: skip
_SPEED = "speed/{row}/{column}"
_GENERATE = "generate/{row}/{column}"
_TRANSFORMERS = "huggingface/{row}"
_GPUS = "distributed/{row}/heads32of8"


def _beside(way: str) -> dict[str, str]:
    """Columns of ratios beside three libraries, in both passes."""
    return {f"{label}, {passed}": f"speed/{{row}}/{passed}/{peer} / speed/{{row}}/{passed}/{way}"
            for label, peer in (("FlashAttention-4", "fa4"), ("cuDNN", "sdpa-cudnn"), ("FlexAttention", "flex"))
            for passed in ("forward", "backward")}  # fmt: skip


TABLES = {
    "speed-beside-fa4": Table(_SIX, _PASSES, f"{_SPEED}/fa4 / {_SPEED}/sparseflash", "mask, live scores", "none"),
    "speed-beside-fa4-all": Table(
        _SIX,
        {f"D={dim} {label}": " / ".join(" + ".join(f"speed/{{row}}/{dim}/{passed}/{way}" for passed in passes)
                                        for way in ("fa4", "sparseflash"))
         for dim in (128, 64)
         for label, passes in (("forward", ("forward",)), ("backward", ("backward",)),
                               ("together", ("forward", "backward")))},
        "", "mask, live scores",
    ),
    "workloads": Table(
        {
            "causal, 8K, batch 4, 32:8 heads, D=128": "llama-causal-8k/128",
            "causal, 2K, batch 16, D=128": "causal-16x2k/128",
            "causal, 8K, D=32": "causal-8k-d32/32",
            "causal, 8K, D=64": "causal-8k-d64/64",
            "causal, 8K, D=80": "causal-8k-d80/80",
            "causal, 8K, D=96": "causal-8k-d96/96",
            "causal, 8K, D=128": "causal-8k-d128/128",
            "causal, 1K, batch 32, D=64": "gpt2-32x1k/64",
            "dense, 512, batch 64, D=64": "bert-64x512/64",
            "1K queries, 64K keys, D=128": "cross-1k-64k/128",
            "128 queries, 64K keys, batch 8, D=128": "cross-128-64k/128",
            "window 1,000, 32K, 32:8 heads, D=128": "window-1000-32k/128",
            "window 1,024, 16K, D=96": "window-1024-d96/96",
            "window 4,096, 64K, 32 heads, D=64": "window-4096-64k-d64/64",
            "32 packed documents, causal, 64K, D=128": "documents-64k/128",
        },
        _beside("sparseflash"), "", "workload", "none",
        "none: cuDNN computes sparse masks densely; at D=80 FlashAttention-4's gradients were wrong.",
    ),
    "workloads-older": Table(
        {
            "causal, 16K, 32 heads, D=64": "causal-16k-d64/64",
            "dense, 16K, 32 heads, D=64": "dense-16k-d64/64",
            "window 1,024, 16K, D=64": "window-1024-16k-d64/64",
            "window 1,024, 16K, D=256": "window-1024-16k-d256/256",
            "Longformer, window 512, 16K, D=64": "longformer-16k/64",
        },
        _beside("sparseflash"), "", "workload", "none", "none: as above.",
    ),
    "head-dims": Table(
        {f"{mask}, D={dim}": f"{case}-d{dim}/{dim}"
         for mask, case, dims in (("dense, 4K, batch 2", "dense-4k", (32, 64, 72, 80, 96)),
                                  ("causal, 8K", "causal-8k", (192, 256))) for dim in dims},
        {label: f"{request} @ h200-head-dims" for label, request in _beside("sparseflash").items()}, "", "workload",
        "none", "none: FlashAttention-4's gradients were wrong.",
    ),
    "shapes": Table(
        {"causal, 8K, queries and keys D=192, values D=128": "deepseek-causal-8k/192",
         "image of 128 x 128, windows of 13 x 13, D=64": "image-128-window-13/64",
         "video of 32 x 32 x 32, windows of 9 x 9 x 9, D=64": "video-32-window-9/64"},
        {label: f"{request} @ h200-shapes" for label, request in _beside("sparseflash").items()}, "", "workload",
        "none", "none: as above.",
    ),
    "scores": Table(
        _CHANGES, {f"D={dim} {label}": f"{dim}/{{row}}/{name}" for dim in (128, 64) for label, name in _BOTH.items()},
        "scores/{column}/sparseflash / scores/{column}/sparseflash-plain", "score modification",
        bold=False,
    ),
    "calls": Table(
        {"a call without gradients": "inference", "forward and backward": "forward-and-backward",
         "forward and backward, one thread": "forward-and-backward-one-thread",
         "new lengths and a call": "new-lengths-and-a-call",
         "the same causal mask, made anew, and a call": "new-causal-mask-and-a-call",
         "another window at every call": "another-window-and-a-call",
         "`top_k_blocks` and a call": "top-k-blocks-and-a-call"},
        {"sparseflash": "sparseflash", "SDPA": "sdpa", "FlexAttention": "flex"}, "calls/{row}/{column} @ h200",
        "host time in µs", "none", units=False,
    ),
    "gpt": Table(
        {"1,024 tokens, batch 64": "small-1024", "4,096 tokens, batch 16": "small-4096"},
        {label: f"gpt/{{row}}/step/{peer} / gpt/{{row}}/step/sparseflash"
         for label, peer in (("SDPA", "sdpa"), ("FlashAttention-4", "fa4"), ("Transformers", "hugging-face"))}
        | {"FlashAttention-4, both a window": "gpt/{row}/step/fa4-window / gpt/{row}/step/sparseflash-window"},
        "", "GPT-2 small, causal", "none",
        "none: the window is as long as the sequence.",
    ),
    "generate": Table(
        {f"{batch} of {tokens:,} tokens": f"{batch}x{tokens}"
         for batch, tokens in ((1, 4096), (1, 16384), (1, 65536), (8, 4096), (8, 16384))},
        {"static cache": "static-cache"}, f"{_GENERATE}/sdpa / {_GENERATE}/sparseflash", "prompts",
    ),
    "transformers": Table(
        {"GPT-2, 16,384 tokens": "gpt2", "Gemma 2, 8,192 tokens": "gemma2", "gpt-oss, 8,192 tokens": "gpt-oss",
         "T5, 8 x 2,048 tokens": "t5", "Swin, 64 images": "swin"},
        {f"{label}, {passed}": f"{_TRANSFORMERS}/{way}/{peer} / {_TRANSFORMERS}/{way}/sparseflash"
         for label, peer in (("SDPA", "sdpa"), ("FlashAttention-4", "fa4"), ("FlexAttention", "flex"))
         for passed, way in (("forward", "forward"), ("training step", "training-step"))},
        "", "model", "none",
        "none: not supported in this model, or not run.",
    ),
    "distributed": Table(
        {"causal": "causal", "a window of 4,096 keys": "window-4096",
         "this window and the first 64 keys": "window-4096-and-64-sinks",
         "documents": "documents", "butterfly": "butterfly", "BigBird": "bigbird"},
        {f"{way}, {label}": f"{_GPUS}/{passed}/one-gpu / {_GPUS}/{passed}/{way} @ h200x2"
         for way in ("auto", "all-gather") for label, passed in _BOTH.items()},
        "", "32 query heads, 8 key heads",
    ),
    "lra-accuracies": Table(
        {"ListOps, 3.4 million parameters, 1.9 minutes": "listops/accuracy/listops-modern",
         "ListOps, 0.2 million parameters (the Nystromformer's sizes), 100,000 steps":
             "listops/accuracy/listops-nystromformer-100000",
         "Pathfinder-32, easier paths first, 4 minutes": "pathfinder32/accuracy/pf32-modern-hard"},
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
    "lm-chosen": Table(
        {"training": "grouped/speed", "time": "grouped/minutes", "loss on other authors": "grouped/test-loss",
         "validation loss": "grouped/loss", "after 9.4 million tokens": "grouped/loss-at-equal-tokens",
         "right block, 512 tokens before": "grouped/right-blocks-of-sentence-512-back",
         "1,024 tokens before": "grouped/right-blocks-of-sentence-1024-back",
         "generation": "grouped-generate/1x32768/tokens", "16 at once": "grouped-generate/16x32768/tokens"},
        {"dense": "dense", "MSA": "msa"}, "lm/{row}/32768-{column}", "32,768 tokens", "none",
        "One seed. Right block: how often a choice held a sentence read before.",
    ),
    "recall": Table(
        {"dense": "dense", "shared blocks": "shared-blocks", "MoBA": "moba", "NSA": "nsa", "VSA": "vsa",
         "a window": "window"},
        {"16,384 tokens": "recall/16384/right-answers/{row}", "256 tokens": "recall/256/right-answers/{row}"},
        "", "right answers", note="± is the standard deviation of three runs; a figure without ± is one run.",
    ),
    "ideas": Table(
        _IDEAS,
        {f"{tokens:,} tokens, {label}":
             f"selection/{{row}}/{tokens}/{passed}/sdpa / selection/{{row}}/{tokens}/{passed}/sparseflash @ h200-ideas"
         for tokens in (8192, 16_384, 65_536) for label, passed in (("forward", "forward"), ("both passes", "both"))},
        "", "speed over dense attention's (SDPA)", "not run",
        "Attention of the layer alone in its paper's sizes, its choice included, with random inputs.",
    ),
    "ideas-fa4": Table(
        {label: name for label, name in _IDEAS.items() if name != "DSA"},
        {f"{label}{graph}":
             f"selection/{{row}}/8192/{passed}/fa4 / selection/{{row}}/8192/{passed}/{way} @ h200-ideas-fa4"
         for graph, way in (("", "sparseflash"), (", in a CUDA graph", "sparseflash-recorded"))
         for label, passed in (("forward", "forward"), ("both passes", "both"))},
        "", "speed over FlashAttention-4's at 8,192 tokens", "none",
        "none: FlashAttention-4's backward refuses values of another width than the keys' in groups of heads.",
    ),
    "exactness": Table(
        {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "TF32 products": "tf32"},
        {"portable kernels": "worst/triton", "Hopper kernels": "worst/hopper",
         "cases, portable": "cases/triton", "cases, Hopper": "cases/hopper"},
        "exactness/{row}/{column}", "largest error / allowed error", "none",
        "At most 1 is within the bound. none: the Hopper kernels take no fp32.", units=False,
    ),
    "masks-made": Table(
        {
            "1,048,576 tokens, `local`, 256 keys": "million/local-causal",
            "1,048,576 tokens, `butterfly`": "million/butterfly",
            "1,048,576 tokens, `bigbird`": "million/bigbird",
            "1,048,576 tokens, `documents`": "million/documents",
            "1,048,576 tokens, `causal`, 34 million tiles": "million/causal",
            "1,048,576 tokens, `dense`, 67 million tiles": "million/dense",
            "1,048,576 tokens, `fixed`, 34 million tiles": "million/fixed",
            "1,048,576 tokens, lists of 16 blocks of 64, two heads": "block-index/1048576",
            "30 x 48 x 80, window 18 x 24 x 24, in tiles": "video/tile-order",
            "the same in row-major order": "video/row-major",
            "32 x 64 x 64, the same window, in Hilbert order": "video/hilbert-order",
            "256 x 256, window 80 x 80, in tiles": "image/256x256/tile-order",
        },
        _MADE, "masks/{row}/{column}/sparseflash", "mask",
    ),
    "masks-packed": Table(
        _PACKED, {"10 sequences": "10", "100": "100", "1,000": "1000", "3,000": "3000", "10,000": "10000"},
        "masks/varlen/{column}/cpu/{row} / masks/varlen/{column}/cpu/documents", "pattern", bold=False,
    ),
    "triton-versions": Table(
        versions.rows(), {"forward": "forward", "backward": "backward"}, versions.CELL, corner=versions.CORNER,
        note="Speed relative to the first row, over the 12 cases of `speed --quick`.", last=versions.OTHERS,
    ),
}  # fmt: skip
TEXTS: dict[str, Callable[[], str]] = {
    "triton-versions": versions.sentence, "compile/fits": compiled.fits, "compile/spills": compiled.spills,
}  # fmt: skip
# Tables of files that are no runs; the tables of tried ideas are named tried/TOPIC/SECTION.
FILES: dict[str, Callable[[], str]] = {"compile/forwards": compiled.forwards}
