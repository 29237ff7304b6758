"""Masks to and from other libraries: `to_x(mask)` converts for library x, `from_x(...)` converts back.

>>> from sparseflash import BlockMask
>>> mask = BlockMask.from_function(lambda q, k: (k <= q) & (q - k < 100), 300, block=64)
>>> from_scipy(to_scipy(mask), block=64) == from_flashmask(*to_flashmask(mask)[:1], causal=True, block=64) == mask
True

A mask that a format cannot represent raises a ValueError with the reason and the first place where it occurs. On the
way out, `lengths` (padding) become part of the pattern. Only SciPy and PyTorch must be installed; other libraries are
imported when their function is called.

| library | out | in | cannot represent |
|---|---|---|---|
| SciPy sparse | `to_scipy`: bool CSR, BSR | `from_scipy`: any format | several patterns at once (select with \
`batch=`, `head=`; a list of heads can be read); BSR: ragged ends |
| PyTorch sparse | `to_torch_sparse`: bool CSR, BSR | `from_torch_sparse`: CSR, BSR, COO | the same |
| PyTorch SDPA | `to_sdpa`: bool `[B, H, Nq, Nk]` | `from_sdpa`: bool, or 0 and -inf | nothing, in `Nq * Nk` bytes |
| FlexAttention | `to_flex`: `BlockMask` with `mask_mod` | `from_flex`: lists, `mask_mod` in partial blocks; \
`from_score_mod`: score modifications | nothing |
| FlashAttention-4 | `to_fa4`: lists of the forward and backward | `from_fa4`: lists, with a `mask_mod` | blocks other \
than 128 keys by multiples of 128 queries; bits of partial tiles, for which the caller supplies a CuTe `mask_mod` |
| FlashInfer | `to_flashinfer`: BSR with block masks | `from_flashinfer`: the same, any block | several patterns at \
once; ragged ends |
| FlashMask | `to_flashmask`: `startend_row_indices` | `from_flashmask`: causal or not | a key with two masked runs of \
queries on one side of the diagonal (butterflies, random blocks) |
| DeepSpeed | `to_deepspeed`: `[H, nb, nb]` and block | `from_deepspeed`: the same | partial tiles (so no ragged ends, \
no causality inside a block), rectangular masks or blocks, masks that differ within the batch |

Whole functions of other libraries, with their arguments and layouts, computed by `attention`, without these libraries:

| module | functions |
|---|---|
| `interop.flash_attn` | `flash_attn_func`, `flash_attn_varlen_func` |
| `interop.flash_attn_cache` | `flash_attn_with_kvcache` |
| `interop.flash_attn_packed` | `flash_attn_qkvpacked_func`, `flash_attn_kvpacked_func`, both also `varlen` |
| `interop.flash_attn_padding` | `unpad_input`, `pad_input`, `index_first_axis` |
| `interop.flex_attention` | `flex_attention`, `create_block_mask` |
| `interop.natten` | `na1d`, `na2d`, `na3d` |
| `interop.natten_layers` | `NeighborhoodAttention1D`, `...2D`, `...3D` |
| `interop.xformers` | `memory_efficient_attention`, with xformers' classes of `attn_bias` |
| `interop.xformers_bias` | these classes, for machines without xformers |
| `interop.fastvideo` | `block_sparse_attn_from_indices` |
| `interop.vllm` | `flash_attn_varlen_func`, over block tables |
| `interop.sglang` | `flash_attn_with_kvcache`, over page tables; `decode_attention`, over pools of tokens |
"""

# `attention` and layers use this package. So modules with whole functions, which import `attention`, are imported on
# first access.

from types import ModuleType

from sparseflash.interop.deepspeed import DeepSpeedLayout, from_deepspeed, to_deepspeed
from sparseflash.interop.fa4 import BlockSparseTensors, FA4BlockSparse, from_fa4, to_fa4
from sparseflash.interop.flashinfer import FlashInferBSR, from_flashinfer, to_flashinfer
from sparseflash.interop.flashmask import FlashMask, from_flashmask, to_flashmask
from sparseflash.interop.flex import from_flex, to_flex
from sparseflash.interop.lookup import TileLookup
from sparseflash.interop.scipy import from_scipy, to_scipy
from sparseflash.interop.score_mods import from_score_mod
from sparseflash.interop.sdpa import from_sdpa, to_sdpa
from sparseflash.interop.torch_sparse import from_torch_sparse, to_torch_sparse

__all__ = [
    "BlockSparseTensors", "DeepSpeedLayout", "FA4BlockSparse", "FlashInferBSR", "FlashMask", "TileLookup",
    "from_deepspeed", "from_fa4", "from_flashinfer", "from_flashmask", "from_flex", "from_scipy", "from_score_mod",
    "from_sdpa", "from_torch_sparse", "to_deepspeed", "to_fa4", "to_flashinfer", "to_flashmask", "to_flex", "to_scipy",
    "to_sdpa", "to_torch_sparse",
]  # fmt: skip

_FUNCTIONS_OF = (
    "fastvideo", "flash_attn", "flash_attn_cache", "flash_attn_packed", "flash_attn_padding", "flex_attention",
    "megatron", "natten", "natten_layers", "sglang", "torchtitan", "vllm", "xformers",
    "xformers_bias",
)  # fmt: skip


def __getattr__(name: str) -> ModuleType:
    """Imports the modules with functions of other libraries on first access."""
    from importlib import import_module

    if name not in _FUNCTIONS_OF:
        raise AttributeError(f"module 'sparseflash.interop' has no attribute {name!r}")
    return import_module(f"sparseflash.interop.{name}")
