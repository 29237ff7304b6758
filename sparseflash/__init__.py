"""sparseflash: exact block-sparse attention.

`BlockMask` says which scores exist, `attention` computes exactly those, and `sparseflash.masks` has ready-made
patterns.

It may import `attention`, `blockmask` and `explain`; the other parts of the library are imported on first access.
"""

from typing import TYPE_CHECKING

from sparseflash.attention import attention as attention
from sparseflash.blockmask import BlockMask as BlockMask
from sparseflash.blockmask.cache import clear_caches as clear_caches
from sparseflash.explain import explain as explain

__version__ = "0.1.0"
__all__ = ["BlockMask", "attention", "clear_caches", "explain"]
_MODULES = ("analysis", "draw", "huggingface", "interop", "masks", "scores", "testing")  # imported on first access

if not TYPE_CHECKING:

    def __getattr__(name):
        """Imports `sparseflash.masks` and the other submodules on first access."""
        if name not in _MODULES:
            raise AttributeError(f"module 'sparseflash' has no attribute {name!r}")
        from importlib import import_module

        return import_module(f"sparseflash.{name}")

    def __dir__():
        """Lists the public names only."""
        return [*__all__, *_MODULES, "__version__"]
