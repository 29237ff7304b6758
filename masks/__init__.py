"""The pattern library: functions from lengths and a few numbers to a `BlockMask`.

>>> from sparseflash import masks
>>> masks.local(4096, window=256) | masks.butterfly(4096)
BlockMask(4096 x 4096, blocks of 128, 222 tiles: 192 full + 30 partial (2 distinct), density 20.2 %)

| family | functions |
|---|---|
| basic | `dense`, `causal`, `prefix_lm`, `documents`, `chunked` |
| windows | `local`, `dilated`, `longformer`, `streaming`, `a_shape`, `tri_shape`, `vertical_slash` |
| butterfly | `butterfly`, `butterfly_2d` |
| factorized | `strided`, `fixed`, `deepspeed_fixed`, `log_sparse`, `hierarchical` |
| random | `bigbird`, `deepspeed_bigbird`, `random_blocks`, `expander` |
| images, videos | `neighborhood`, `sliding_tiles`, `swin`, `axial`, `dilated_grid`; orders of tokens: `order` |
| chosen from data | `top_k_blocks`, `mass_blocks`, `top_k_keys`, `selected_keys`; scores of blocks: `pooled_scores`, \
`antidiagonal_scores`; lists of the best blocks: `select_blocks` |
| several masks in one | `per_head`, `per_batch`; text beside a grid: `with_text` |

Lengths are given by position, everything else by name. Lengths are in tokens.
"""

from typing import TYPE_CHECKING, NoReturn

if __name__ != "sparseflash.masks":
    raise ImportError("import the pattern library as sparseflash.masks, not as masks.")

from sparseflash.masks import order
from sparseflash.masks.antidiagonal_scores import antidiagonal_scores
from sparseflash.masks.axial import axial
from sparseflash.masks.bigbird import bigbird, deepspeed_bigbird
from sparseflash.masks.butterfly import butterfly
from sparseflash.masks.butterfly_2d import butterfly_2d
from sparseflash.masks.causal import causal
from sparseflash.masks.chosen_blocks import mass_blocks, top_k_blocks
from sparseflash.masks.chosen_keys import selected_keys, top_k_keys
from sparseflash.masks.chunked import chunked
from sparseflash.masks.deepspeed_fixed import deepspeed_fixed
from sparseflash.masks.dense import dense
from sparseflash.masks.dilated_grid import dilated_grid
from sparseflash.masks.documents import documents
from sparseflash.masks.expander import expander
from sparseflash.masks.hierarchical import hierarchical
from sparseflash.masks.local import dilated, local
from sparseflash.masks.log_sparse import log_sparse
from sparseflash.masks.longformer import longformer
from sparseflash.masks.neighborhood import neighborhood
from sparseflash.masks.other_names import no_pattern as _no_pattern
from sparseflash.masks.pooled_scores import pooled_scores
from sparseflash.masks.prefix_lm import prefix_lm
from sparseflash.masks.random_blocks import random_blocks
from sparseflash.masks.select_blocks import select_blocks
from sparseflash.masks.sliding_tiles import sliding_tiles
from sparseflash.masks.sparse_transformer import fixed, strided
from sparseflash.masks.stack import per_batch, per_head
from sparseflash.masks.streaming import a_shape, streaming, tri_shape
from sparseflash.masks.swin import swin
from sparseflash.masks.vertical_slash import vertical_slash
from sparseflash.masks.with_text import with_text

__all__ = [
    "a_shape", "antidiagonal_scores", "axial", "bigbird", "butterfly", "butterfly_2d", "causal", "chunked",
    "deepspeed_bigbird", "deepspeed_fixed", "dense", "dilated", "dilated_grid", "documents", "expander", "fixed",
    "hierarchical", "local", "log_sparse", "longformer", "mass_blocks", "neighborhood", "order", "per_batch",
    "per_head", "pooled_scores", "prefix_lm", "random_blocks", "select_blocks", "selected_keys", "sliding_tiles",
    "streaming", "strided", "swin", "top_k_blocks", "top_k_keys", "tri_shape", "vertical_slash", "with_text",
]  # fmt: skip

if not TYPE_CHECKING:  # a type checker would accept any name in a module with this function

    def __getattr__(name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        raise _no_pattern(name, __all__)
