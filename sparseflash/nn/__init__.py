"""Modules: attention over the live scores of a mask, with projections, rotary positions, dropout and a cache.

>>> import torch
>>> from sparseflash import masks, nn
>>> layer = nn.SparseSelfAttention(64, 4, masks.local(256, window=32, causal=True), rotary=nn.Rotary(16))
>>> layer(torch.randn(2, 256, 64)).shape
torch.Size([2, 256, 64])

| module | for |
|---|---|
| `SparseSelfAttention` | new models: `x -> out`, with grouped heads, rotary positions and a cache for generation |
| `SparseCrossAttention` | queries from one sequence, keys and values from another |
| `MultiheadAttention` | in place of `torch.nn.MultiheadAttention`, with its arguments and its `state_dict` |
| `GraphedStep` | generation without waiting for the host: a step with caches as a CUDA graph |
| `Rotary`, `Rotary2D` | positions in a sequence, or in an image |
"""

from sparseflash.nn.cross_attention import SparseCrossAttention
from sparseflash.nn.graphed_step import GraphedStep
from sparseflash.nn.kv_cache import KVCache
from sparseflash.nn.multihead import MultiheadAttention
from sparseflash.nn.rotary import Rotary, Rotary2D, rotate
from sparseflash.nn.self_attention import SparseSelfAttention

__all__ = [
    "GraphedStep", "KVCache", "MultiheadAttention", "Rotary", "Rotary2D", "SparseCrossAttention", "SparseSelfAttention",
    "rotate",
]  # fmt: skip
