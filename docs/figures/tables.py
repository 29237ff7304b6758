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
_IDEAS = {name: name for name in ("NSA", "MoBA", "MSA", "DSA", "QSA", "VSA")}
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
    "speed-beside-others": Table(
        {"FlexAttention, six masks": "*/{column}/flex / speed/*/{column}/sparseflash @ h200",
         **{f"cuDNN, {mask}": f"{mask}/{{column}}/sdpa-cudnn / speed/{mask}/{{column}}/sparseflash"
            for mask in ("dense", "causal")}},
        _PASSES, "speed/{row}", "compared with",
    ),
    "speed-over-dense": Table(
        {label: row for label, row in _SIX.items() if row not in ("dense", "causal")}, _PASSES,
        "speed/dense/{column}/fa4 / speed/{row}/{column}/sparseflash @ h200", "mask, live scores",
    ),
    "deterministic": Table(
        {"dense": "dense", "causal": "causal",
         "windows of 64 and 256 keys on each side": "window{64,256} @ h200-windows"},
        {f"D={dim} backward": f"{dim}/backward" for dim in (128, 64)},
        f"{_SPEED}/fa4-deterministic / {_SPEED}/sparseflash", "compared with its deterministic mode",
    ),
    "cudnn-sparse": Table(
        {f"blocks of {block}": f"blocks-of-{block}/*" for block in (64, 128)}, _PASSES,
        f"{_SPEED}/cudnn-sparse / {_SPEED}/sparseflash @ h200-block-sparse-peers", "compared with cuDNN", "none",
    ),
    "workloads": Table(
        {
            "dense, 512, batch 64, D=64": "bert-64x512/64",
            **{f"dense, 4K, batch 2, D={dim}": f"dense-4k-d{dim}/{dim}" for dim in (32, 64, 72, 80, 96, 128, 192, 256)},
            "dense, 16K, 32 heads, D=64": "dense-16k-d64/64",
            "causal, 1K, batch 32, D=64": "gpt2-32x1k/64",
            "causal, 2K, batch 16, D=128": "causal-16x2k/128",
            **{f"causal, 8K, D={dim}": f"causal-8k-d{dim}/{dim}" for dim in (32, 64, 80, 96, 128, 192, 256)},
            "causal, 8K, D=192, values D=128": "deepseek-causal-8k/192",
            "causal, 8K, batch 4, 32:8 heads, D=128": "llama-causal-8k/128 @ h200-workloads",
            "causal, 16K, 32 heads, D=64": "causal-16k-d64/64",
            "1K queries, 64K keys, D=128": "cross-1k-64k/128",
            "128 queries, 64K keys, batch 8, D=128": "cross-128-64k/128",
            **{f"windows of 64 and 256 keys on each side, 16K, {heads} heads, D={dim}":
                   f"window{{64,256}}/{dim} @ h200-windows" for heads, dim in ((16, 128), (32, 64))},
            "window 1,000, 32K, 32:8 heads, D=128": "window-1000-32k/128",
            **{f"window 1,024, 16K, D={dim}": f"{name}/{dim}"
               for dim, name in ((64, "window-1024-16k-d64"), (96, "window-1024-d96"), (128, "window-1024-16k-d128"),
                                 (256, "window-1024-16k-d256"))},
            "window 4,096, 64K, 32 heads, D=64": "window-4096-64k-d64/64",
            "32 packed documents, causal, 64K, D=128": "documents-64k/128",
            "prefix of 2K, then causal, 8K, D=128": "prefix-8k/128",
            "padded batch of 16, 4K, D=64": "padded-16x4k/64",
            "Longformer, window 512, 16K, D=64": "longformer-16k/64",
            "image, 128 x 128, windows of 13 x 13, D=64": "image-128-window-13/64",
            "video, 32 x 32 x 32, windows of 9 x 9 x 9, D=64": "video-32-window-9/64",
        },
        _beside("sparseflash"), "", "mask and shape", "none",
    ),
    "scores": Table(
        _CHANGES, {f"D={dim} {label}": f"{dim}/{{row}}/{name}" for dim in (128, 64) for label, name in _BOTH.items()},
        "scores/{column}/sparseflash / scores/{column}/sparseflash-plain", "score modification",
        bold=False,
    ),
    "chosen-blocks": Table(
        {f"{tokens:,} tokens, {mask}, {label}":
             f"{case}/known/{passed}/{{column}} / selection/{case}/{way.format(passed)} @ {run}"
         for tokens, case, run in ((16_384, "16384-heads16of16-causal-16x128-a-block", "h200-blocks-16k"),
                                   (65_536, "65536-heads64of4-causal-16x128-a-block", "h200"))
         for mask, way in (("mask made before", "known/{}/sparseflash"),
                           ("made each time", "chosen/{}/sparseflash-recorded"))
         for label, passed in _BOTH.items()},
        {"FlashAttention-4": "fa4", "FlexAttention": "flex"}, "selection/{row}", "compared with",
    ),
    "decode": Table(
        {"1 cache of 65,536 tokens": "1x65536-heads32of8-new1", "8 or 64 of 65,536": "{8,64}x65536-heads32of8-new1",
         "16 of 8,192": "16x8192-heads32of8-new1", "16 of 8,192, four new tokens": "16x8192-heads32of8-new4"},
        {label: f"decode/{{row}}/{cache}/{peer} / decode/{{row}}/{cache}/sparseflash @ h200"
         for label, cache, peer in (("SDPA, contiguous cache", "contiguous", "sdpa"),
                                    ("FlashInfer, pages of 16 or 64", "pages-of-*", "flashinfer"))},
        "", "caches", "none",
    ),
    "calls": Table(
        {"forward, no gradients": "inference", "forward and backward": "forward-and-backward",
         "forward and backward, one thread": "forward-and-backward-one-thread",
         "forward, new padding lengths each time": "new-lengths-and-a-call",
         "forward, the same causal mask requested again": "new-causal-mask-and-a-call",
         "forward, a new window size each time": "another-window-and-a-call",
         "forward, `top_k_blocks` each time": "top-k-blocks-and-a-call"},
        {"sparseflash": "sparseflash", "SDPA": "sdpa", "FlexAttention": "flex"},
        "calls/{row}/{column} @ h200-quiet-host", "host time, µs", "none", units=False,
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
    "lm-speed": Table(
        {f"{tokens:,} tokens": str(tokens) for tokens in (16_384, 65_536)},
        {"SDPA, dense": "dense/tokens/sdpa", "sparseflash, dense": "dense/tokens/sparseflash",
         "sparseflash, `local \\| butterfly`": "local-or-butterfly/tokens/sparseflash"},
        "lm-speed/124m/{row}/{column}", "context",
    ),
    "lm-losses": Table(
        {"16,384 tokens, dense": "16384-dense", "16,384 tokens, `local \\| butterfly`": "16384-local-or-butterfly",
         "16,384 tokens, a window of 1,024": "16384-window", "2,048 tokens, dense": "2048-dense"},
        {"validation loss a token": "loss", "trained on": "tokens", "speed": "speed"}, "lm/10-minutes/{column}/{row}",
        "context, mask", note="One seed.",
    ),
    "lm-chosen": Table(
        {"training time": "grouped/minutes", "training speed": "grouped/speed",
         "validation loss after this time": "grouped/loss",
         "validation loss after 9.4 million tokens": "grouped/loss-at-equal-tokens",
         "test loss, other authors": "grouped/test-loss", "generation, 1 sequence": "generate/1x32768/tokens",
         "generation, 16 sequences": "generate/16x32768/tokens"},
        {"dense": "dense", "MSA": "msa"}, "lm/{row}/32768-{column}", "32,768 tokens of context", note="One seed.",
    ),
    "recall": Table(
        {"dense": "dense", "shared blocks": "shared-blocks", "MoBA": "moba", "NSA": "nsa", "VSA": "vsa",
         "a window": "window"},
        {"16,384 tokens": "recall/16384/right-answers/{row}", "256 tokens": "recall/256/right-answers/{row}"},
        "", "right answers", note="± is the standard deviation of three runs; a figure without ± is one run.",
    ),
    "ideas": Table(
        _IDEAS,
        {f"{label}, {tokens // 1024}K":
             f"selection/{{row}}/{tokens}/{passed}/fa4 / selection/{{row}}/{tokens}/{passed}/sparseflash @ h200-ideas"
         for label, passed in (("forward", "forward"), ("both passes", "both"))
         for tokens in (8192, 16_384, 32_768, 65_536)},
        "", "compared with FlashAttention-4", "none",
        "± ?: the spread was not measured. none: FlashAttention-4's backward refuses grouped heads whose values are "
        "wider or narrower than the keys.",
    ),
    "ideas-rates": Table(
        _IDEAS,
        {f"{label}, {tokens // 1024}K": f"selection/{{row}}/{tokens}/{passed}/sparseflash in TFLOP/s @ h200-ideas"
         for label, passed in (("forward", "forward"), ("both passes", "both")) for tokens in (8192, 65_536)},
        "", "useful TFLOP/s, choice included", units=False,
    ),
    "exactness": Table(
        {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "TF32 products": "tf32"},
        {"portable kernels": "worst/triton", "Hopper kernels": "worst/hopper",
         "cases, portable": "cases/triton", "cases, Hopper": "cases/hopper"},
        "exactness/{row}/{column}", "largest error / allowed error", "none",
        "none: the Hopper kernels take no fp32.", units=False,
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
