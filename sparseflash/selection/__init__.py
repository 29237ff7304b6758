"""Layers that choose their keys at every step, one idea a module, with indexer, loss, packed sequences and cache.

>>> import torch
>>> from sparseflash import selection
>>> layer = selection.BlockSelection(64, 4, 2, block=32, chosen=4)
>>> layer(torch.randn(2, 300, 64)).shape
torch.Size([2, 300, 64])

| module | who chooses | what | by |
|---|---|---|---|
| `NativeSparseAttention` (NSA) | each query, for a group of heads | blocks of keys | weights of compressed keys |
| `MixtureOfBlocks` (MoBA) | each query head | blocks of keys | mean keys |
| `BlockSelection` (MSA) | each query, for a group of heads | blocks of keys | an indexer's best key of a block |
| `TokenSelection` (DSA) | each query, for all heads | tokens | an indexer |
| `SpanSelection` (QSA) | each query, for all heads | spans of 4 tokens | an indexer's mean keys |
| `VideoSparseAttention` (VSA) | each cube of each head | cubes of a video | mean queries and keys |
"""

from sparseflash.selection.block_selection import BlockSelection
from sparseflash.selection.cache import SelectionCache
from sparseflash.selection.context import Context
from sparseflash.selection.latent import Latent
from sparseflash.selection.mixture_of_blocks import MixtureOfBlocks
from sparseflash.selection.native_sparse import NativeSparseAttention
from sparseflash.selection.span_selection import SpanSelection
from sparseflash.selection.token_selection import TokenSelection
from sparseflash.selection.video_sparse import VideoSparseAttention

__all__ = [
    "BlockSelection", "Context", "Latent", "MixtureOfBlocks", "NativeSparseAttention", "SelectionCache",
    "SpanSelection", "TokenSelection", "VideoSparseAttention",
]  # fmt: skip
