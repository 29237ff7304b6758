"""The pattern library: pure functions from lengths and a few numbers to a `BlockMask`, one family a file.

In the repository this folder stands at the top; it is imported as `sparseflash.masks`.
"""

if __name__ != "sparseflash.masks":
    raise ImportError("import the pattern library as sparseflash.masks, not as masks.")

from sparseflash.masks.butterfly import butterfly as butterfly
from sparseflash.masks.butterfly_2d import butterfly_2d as butterfly_2d
from sparseflash.masks.causal import causal as causal
from sparseflash.masks.chunked import chunked as chunked
from sparseflash.masks.deepspeed_fixed import deepspeed_fixed as deepspeed_fixed
from sparseflash.masks.dense import dense as dense
from sparseflash.masks.documents import documents as documents
from sparseflash.masks.hierarchical import hierarchical as hierarchical
from sparseflash.masks.local import dilated as dilated
from sparseflash.masks.local import local as local
from sparseflash.masks.log_sparse import log_sparse as log_sparse
from sparseflash.masks.longformer import longformer as longformer
from sparseflash.masks.prefix_lm import prefix_lm as prefix_lm
from sparseflash.masks.sparse_transformer import fixed as fixed
from sparseflash.masks.sparse_transformer import strided as strided
from sparseflash.masks.streaming import a_shape as a_shape
from sparseflash.masks.streaming import streaming as streaming
from sparseflash.masks.streaming import tri_shape as tri_shape
from sparseflash.masks.vertical_slash import vertical_slash as vertical_slash

__all__ = [
    "a_shape",
    "butterfly",
    "butterfly_2d",
    "causal",
    "chunked",
    "deepspeed_fixed",
    "dense",
    "dilated",
    "documents",
    "fixed",
    "hierarchical",
    "local",
    "log_sparse",
    "longformer",
    "prefix_lm",
    "streaming",
    "strided",
    "tri_shape",
    "vertical_slash",
]
