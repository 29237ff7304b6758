"""sparseflash: exact block-sparse attention.

>>> import torch
>>> from sparseflash import attention, masks
>>> q, k, v = (torch.randn(1, 2, 300, 16) for _ in range(3))
>>> attention(q, k, v, masks.local(300, window=64, causal=True)).shape
torch.Size([1, 2, 300, 16])

| name | for |
|---|---|
| `attention` | attention over the live scores of a mask, with gradients |
| `BlockMask` | the mask: which scores are live |
| `masks` | ready-made patterns: windows, butterflies, images, blocks chosen by the model, ... |
| `scores` | score modifications: ALiBi, soft caps, biases, sinks, your own functions |
| `explain` | which kernels a call runs, and why |
| `merge_attention` | results over parts of the keys, merged into the result over all |
| `sdpa` | the same attention with the arguments of PyTorch's `scaled_dot_product_attention` |
| `attention_varlen`, `varlen` | packed sequences of different lengths |
| `decode`, `grouped` | generation with a cache; a list of key blocks for each query |
| `nn`, `huggingface`, `distributed` | layers; models of Transformers; tokens spread over several GPUs |
| `selection` | layers that choose their keys: NSA, MoBA, MSA, DSA, QSA, VSA |
| `analysis`, `draw` | cost, reach and mistakes of a mask; pictures |
| `interop` | masks to and from other libraries |
| `testing` | whether an attention is exact |
| `clear_caches`, `PerformanceWarning` | empties all caches; the category of warnings about slow kernels |
"""

# `scaled_dot_product` and `varlen` need Dynamo, which is slow to import, so they and the parts of the library that are
# not named below are imported on first access.

import os
import sys
from typing import TYPE_CHECKING


def _is_help(command: list[str], arguments: int) -> bool:
    """Whether a process, by its command line and number of arguments, prints the help or version of the command line.

    >>> _is_help(["python", "-m", "sparseflash", "show", "--help"], 2), _is_help(["python", "train.py", "--help"], 1)
    (True, False)
    """
    program, asked = command[: len(command) - arguments], command[len(command) - arguments :]
    if not program or os.path.splitext(os.path.basename(program[-1]))[0] != "sparseflash":
        return False
    until = asked.index("--") if "--" in asked else len(asked)
    return not asked or not {"--help", "--version"}.isdisjoint(asked[:until])


# Help should appear at once, and PyTorch takes seconds to import.
if not _is_help(sys.orig_argv, len(sys.argv) - 1):
    from sparseflash.attention import attention as attention
    from sparseflash.blockmask import BlockMask as BlockMask
    from sparseflash.blockmask.cache import clear_caches as clear_caches
    from sparseflash.explain import explain as explain
    from sparseflash.performance import PerformanceWarning as PerformanceWarning

if TYPE_CHECKING:
    from sparseflash.merge import merge_attention as merge_attention
    from sparseflash.scaled_dot_product import sdpa as sdpa
    from sparseflash.varlen import attention_varlen as attention_varlen

__version__ = "0.3.0"
__all__ = [
    "BlockMask", "PerformanceWarning", "attention", "attention_varlen", "clear_caches", "explain", "merge_attention",
    "sdpa",
]  # fmt: skip
_MODULES = (
    "analysis", "decode", "distributed", "draw", "grouped", "huggingface", "interop", "masks", "nn", "scores",
    "selected_tokens", "selection", "testing", "varlen",
)  # fmt: skip
_FUNCTIONS = {  # their modules, imported on first access
    "attention_varlen": "varlen",
    "merge_attention": "merge",
    "sdpa": "scaled_dot_product",
}

if not TYPE_CHECKING:

    def __getattr__(name):
        from importlib import import_module

        if name in _FUNCTIONS:
            return getattr(import_module(f"sparseflash.{_FUNCTIONS[name]}"), name)
        if name not in _MODULES:
            raise AttributeError(f"module 'sparseflash' has no attribute {name!r}")
        return import_module(f"sparseflash.{name}")

    def __dir__():
        return [*__all__, *_MODULES, "__version__"]
