from __future__ import annotations

import copy
import gc

import torch
from torch import nn

from sparseflash import huggingface

OURS = "sparseflash"
_REGISTERED = "block_sparse"  # a name with "flash" would be a FlashAttention


def available() -> list[str]:
    from transformers import utils

    installed = {
        "flash_attention_2": utils.is_flash_attn_2_available,
        "flash_attention_3": utils.is_flash_attn_3_available,
        "flash_attention_4": utils.is_flash_attn_4_available,
    }
    return ["eager", "sdpa", "flex_attention", *(name for name, is_there in installed.items() if is_there()), OURS]


def recorded_as(implementation: str) -> str:
    return {"flex_attention": "flex", "flash_attention_4": "fa4"}.get(implementation, implementation)


def with_attention(model: nn.Module, implementation: str) -> nn.Module:
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
    used: str = getattr(getattr(module, "config", None), "_attn_implementation", default)
    return used


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
