"""sparseflash: exact block-sparse attention.

`BlockMask` describes the live scores, `attention` computes exactly those, and `sparseflash.masks` has ready-made
patterns.

It may import `attention`, `blockmask`, `explain`, `performance`, `scaled_dot_product` and `varlen`. The last two need
Dynamo, which is slow to import, so they and the other parts of the library are imported on first access.
"""

from typing import TYPE_CHECKING

from sparseflash.attention import attention as attention
from sparseflash.blockmask import BlockMask as BlockMask
from sparseflash.blockmask.cache import clear_caches as clear_caches
from sparseflash.explain import explain as explain
from sparseflash.performance import PerformanceWarning as PerformanceWarning

if TYPE_CHECKING:
    from sparseflash.scaled_dot_product import sdpa as sdpa
    from sparseflash.varlen import attention_varlen as attention_varlen

__version__ = "0.3.0"
__all__ = ["BlockMask", "PerformanceWarning", "attention", "attention_varlen", "clear_caches", "explain", "sdpa"]
_MODULES = (
    "analysis",
    "decode",
    "distributed",
    "draw",
    "grouped",
    "huggingface",
    "interop",
    "masks",
    "nn",
    "scores",
    "testing",
    "varlen",
)  # imported on first access
_FUNCTIONS = {"attention_varlen": "varlen", "sdpa": "scaled_dot_product"}  # their modules, imported on first access

if not TYPE_CHECKING:

    def __getattr__(name):
        """Imports `sparseflash.masks` and the other submodules, and functions of some, on first access."""
        from importlib import import_module

        if name in _FUNCTIONS:
            return getattr(import_module(f"sparseflash.{_FUNCTIONS[name]}"), name)
        if name not in _MODULES:
            raise AttributeError(f"module 'sparseflash' has no attribute {name!r}")
        return import_module(f"sparseflash.{name}")

    def __dir__():
        return [*__all__, *_MODULES, "__version__"]
