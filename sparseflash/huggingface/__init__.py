"""Hugging Face Transformers: its models with this attention, and optionally a sparsity pattern on top of their masks.

Transformers calls twice: once per forward to build the masks from rules, and once per layer for the attention. The
first call returns a `ModelMask` (model_mask.py), not yet a mask, because a layer's pattern may leave out most of the
scores that the rules allow; the second is `Attention` (layer.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from sparseflash.blockmask.arguments import Block, block_pair, checked_mask
from sparseflash.huggingface.layer import Attention, Pattern
from sparseflash.huggingface.model_mask import mask_of_forward

__all__ = ["register"]

_COLLECTS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def register(pattern: Pattern = None, *, name: str = "block_sparse", block: Block = 128) -> None:
    """Makes this attention available to Hugging Face Transformers as `attn_implementation=name`.

    >>> import torch
    >>> from sparseflash import masks
    >>> register(masks.local(512, window=64, causal=True), name="near")
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=10, **sizes))
    >>> model.set_attn_implementation("near")
    >>> model(torch.zeros(1, 100, dtype=torch.int64)).logits.shape
    torch.Size([1, 100, 10])

    A trained model selects it with `from_pretrained(..., attn_implementation=name)`, an existing one with
    `set_attn_implementation`. Needs `pip install transformers`, 5.17 or newer.

    The model's own masks stay in force: causal, sliding window, packed sequences, and the padding of `attention_mask`.
    Every layer gives the numbers of `"eager"` up to rounding, except that a query without any live key gives 0. The
    page "In a Hugging Face model" lists what works.

    Args:
        pattern: a mask that restricts the live scores further; None: only the models' own masks. Its query i and key j
            are tokens i and j of a row of the batch, counting padding and the contents of a cache. It must be as long
            as the longest row, generated tokens included; shorter rows use its beginning. Or a function that takes an
            attention module (in most models `getattr(module, "layer_idx", None)` is its number), not a length, and
            returns the module's mask, the same object at every call, or None for no pattern.
        name: models select it by this name. To register a name again replaces the pattern in models that use it.
        block: tokens per side of a tile, for masks without a pattern; others have the pattern's blocks.

    A single pattern applies to every attention that the model computes by this name, also in a vision tower (to
    restrict it to the text: `attn_implementation={"text_config": name}`) and in cross-attention between equally many
    tokens. Cross-attention with other lengths raises; a function can return None for it.

    Raises:
        ValueError: the name belongs to another implementation, or Transformers would interpret it differently.
        TypeError: `pattern` is a function of lengths or of positions.
        ImportError: Transformers is missing or too old.

    Models raise ValueError for attention weights (`output_attentions`), keys that a layer chooses itself and paged
    caches; TypeError or AttributeError if they compute with their masks themselves; and NotImplementedError for
    `torch.export`.
    """
    attentions, rules = _interfaces()
    if not isinstance(name, str) or not name.isidentifier() or "flash" in name:
        raise ValueError(
            "name must be an identifier that does not contain flash, or Transformers would look for a FlashAttention "
            f"or a kernel to load; got {name!r}."
        )
    if name == "eager" or (name in attentions and not isinstance(attentions[name], Attention)):
        raise ValueError(f"name must not be the name of another implementation; got {name!r}.")
    block_pair(block)
    if callable(pattern):
        _check_takes_a_module(pattern)
    elif pattern is not None:
        checked_mask(pattern)
    type(attentions).register(name, Attention(pattern, block))
    type(rules).register(name, partial(mask_of_forward, block=block, pattern=pattern))


def _check_takes_a_module(pattern: Callable[..., Any]) -> None:
    """Refuses a function of lengths, which layers of sparseflash.nn take, and a rule, which `from_function` takes."""
    try:
        parameters = inspect.signature(pattern).parameters.values()
    except ValueError:
        return
    names = [each.name for each in parameters]
    needed = [each for each in parameters if each.default is each.empty and each.kind not in _COLLECTS]
    if names[:1] == ["q_len"]:
        raise TypeError(
            "pattern must be a mask or a function of an attention module; got a function of q_len. Call it with the "
            "number of tokens that no row will exceed, such as register(masks.causal(4096))."
        )
    if not names or len(needed) > 1:
        raise TypeError(
            f"pattern must be a mask or a function of an attention module; got a function of ({', '.join(names)}). "
            "From a rule on positions a mask is made for the number of tokens that no row will exceed: "
            "register(BlockMask.from_function(rule, 4096))."
        )


def _interfaces() -> tuple[Any, Any]:
    """Transformers' registries of attention functions and of functions that make masks."""
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise ImportError(
            f"huggingface.register needs Transformers 5.17 or newer: pip install 'sparseflash[transformers]' ({error})."
        ) from error
    return ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
