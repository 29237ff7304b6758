"""sparseflash: exact block-sparse attention.

`BlockMask` says which scores exist, `attention` computes exactly those, `sparseflash.masks` has ready patterns.

May import `attention` and `blockmask`. The other parts of the library are loaded when they are first asked for.
"""

from typing import TYPE_CHECKING

from sparseflash.attention import attention as attention
from sparseflash.blockmask import BlockMask as BlockMask
from sparseflash.blockmask.cache import clear_caches as clear_caches
from sparseflash.explain import explain as explain

__version__ = "0.1.0"
__all__ = ["BlockMask", "attention", "clear_caches", "explain"]
_MODULES = ("analysis", "draw", "huggingface", "interop", "masks", "testing")  # loaded when they are first asked for

if not TYPE_CHECKING:

    def __getattr__(name):
        """`sparseflash.masks` and the like without an import of their own."""
        if name not in _MODULES:
            raise AttributeError(f"module 'sparseflash' has no attribute {name!r}")
        from importlib import import_module

        return import_module(f"sparseflash.{name}")

    def __dir__():
        """What is public, and nothing else."""
        return [*__all__, *_MODULES, "__version__"]
