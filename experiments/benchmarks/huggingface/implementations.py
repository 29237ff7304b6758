"""The attention implementations of Transformers, and models that have one each but share their weights."""

from __future__ import annotations

import copy
import gc

import torch
from torch import nn

from sparseflash import huggingface

OURS = "sparseflash"
_REGISTERED = "block_sparse"  # Transformers reads a name with "flash" as one of a FlashAttention


def available() -> list[str]:
    """The available implementations: Transformers' own, FlashAttention where it is installed, and this library's."""
    from transformers import utils

    installed = {
        "flash_attention_2": utils.is_flash_attn_2_available,
        "flash_attention_3": utils.is_flash_attn_3_available,
        "flash_attention_4": utils.is_flash_attn_4_available,
    }
    return ["eager", "sdpa", "flex_attention", *(name for name, is_there in installed.items() if is_there()), OURS]


def recorded_as(implementation: str) -> str:
    """The implementation in names of measurements."""
    return {"flex_attention": "flex", "flash_attention_4": "fa4"}.get(implementation, implementation)


def with_attention(model: nn.Module, implementation: str) -> nn.Module:
    """The same model, with the same parameters and buffers, that computes its attention in this way.

    Raises what Transformers raises, or ValueError where it only warns, if the model does not have this implementation.
    """
    shared = {id(each): each for each in (*model.parameters(), *model.buffers())}
    made = copy.deepcopy(model, shared)
    name = implementation
    if implementation == OURS:
        huggingface.register(name=_REGISTERED)
        name = _REGISTERED
    made.set_attn_implementation(name)  # type: ignore[operator]
    for module in made.modules():
        # Transformers 5.17 does not reach the encoder and the decoder of a T5.
        if _used(module, name) != name and hasattr(module, "set_attn_implementation"):
            module.set_attn_implementation(name)  # type: ignore[operator]
        if (used := _used(module, name)) != name:
            raise ValueError(f"{type(module).__name__} must use {implementation}; it uses {used}.")
    return made


def _used(module: nn.Module, default: str) -> str:
    """The attention implementation that a part of a model names, or the default."""
    used: str = getattr(getattr(module, "config", None), "_attn_implementation", default)
    return used


def release(device: torch.device) -> None:
    """Frees unused memory, including a failed call's."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
