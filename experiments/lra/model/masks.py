from __future__ import annotations

from sparseflash import BlockMask, masks
from sparseflash.cli.pattern_text import mask_of_pattern, parts

NAMES = ("dense", "local", "butterfly")


def build(name: str, length: int, *, block: int, window: int) -> BlockMask:
    """name: "dense", "local" (|q - k| <= window // 2), "butterfly", or what `mask_of_pattern` takes: a pattern of the
    library, such as "longformer(n, window=64, global_tokens=16)" for n tokens, or a function of the user's, as
    "module:function" or "path/to/file.py:function".
    """
    named = {
        "dense": lambda: BlockMask.dense(length, block=block),
        "local": lambda: masks.local(length, window=window, block=block),
        "butterfly": lambda: masks.butterfly(length, block=block),
    }
    return mask_of_pattern(name, length, block=block, named=named)


def several(text: str) -> list[str]:
    """Masks with commas between them; a comma inside parentheses is a mask's own.

    >>> several("dense,local(n, window=64) | butterfly(n)")
    ['dense', 'local(n, window=64) | butterfly(n)']
    """
    return parts(text, ",")
