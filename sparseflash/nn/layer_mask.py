"""The mask of a layer at any lengths, on any device."""

from __future__ import annotations

from typing import Any

import torch

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.cache import BoundedDict, once
from sparseflash.captured import Captured
from sparseflash.masks.causal import is_causal
from sparseflash.pattern import Pattern, mask_of_lengths

Mask = BlockMask | Pattern | None
_KEPT = 16  # masks of a layer, by lengths and device


class LayerMask:
    """A mask, or a function of the lengths that returns one, asked for lengths and a device.

    >>> from sparseflash import masks
    >>> LayerMask(masks.causal)(100, 100, torch.device("cpu")) == masks.causal(100)
    True

    A `BlockMask` also serves shorter sequences, by its first queries and keys. Masks are cached until numbers or
    tensors that the function captures change; a copied or pickled layer starts without this cache.
    """

    def __init__(self, mask: Mask) -> None:
        if not (mask is None or isinstance(mask, BlockMask) or callable(mask)):
            raise TypeError(
                "mask must be a BlockMask, a function of a length that returns one, such as masks.causal, or None; got "
                f"{type(mask).__name__}."
            )
        self.given = mask
        self._made = BoundedDict(_KEPT)
        self._captured = Captured(mask)

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerMask, (self.given,)

    def __repr__(self) -> str:
        return "all" if self.given is None else getattr(self.given, "__name__", None) or repr(self.given)

    def __call__(self, q_len: int, k_len: int, device: torch.device) -> BlockMask | None:
        if self.given is None or q_len == 0 or k_len == 0:
            return None
        if torch.compiler.is_compiling():
            return self._for(q_len, k_len).to(device)
        if isinstance(self.given, BlockMask) and self._fits(self.given, q_len, k_len, device):
            return self.given
        if not self._captured.is_still(Captured(self.given)):
            self._made.clear()

        def make() -> BlockMask:
            made = self._for(q_len, k_len).to(device)
            self._captured = Captured(self.given)  # as the function has left it, which may count its calls
            return made

        return once(self._made, (q_len, k_len, device), make)

    def causal_of(self, batch: int, heads: int, tokens: int, device: torch.device) -> BlockMask:
        """The mask for `batch` sequences of up to `tokens` tokens that are generated one after another.

        Raises ValueError unless it is causal, has no lengths, and has batch 1 or `batch`, and heads 1 or `heads`.
        """
        mask = self(tokens, tokens, device)
        if mask is None:
            raise ValueError(
                "mask must be causal for generation, since a new token cannot see later ones; got None, with which all "
                "tokens see one another. Give the layer mask=masks.causal."
            )
        if mask.lengths is not None:
            raise ValueError(
                "mask must have no lengths of its own for generation, in which all sequences are equally long; got "
                "some. Give the layer the mask without them, and lengths to the calls without a cache."
            )
        if 1 != mask.shape[0] != batch:
            raise ValueError(
                f"mask must be for one sequence or for {batch}, as the cache is; got one for {mask.shape[0]}."
            )
        if 1 != mask.shape[1] != heads:
            raise ValueError(f"mask must be for one head or for the layer's {heads}; got one for {mask.shape[1]}.")
        key = "causal", tokens, device
        if torch.compiler.is_compiling() or self._made.get(key) is mask:  # checked when the cache was made, or before
            return mask
        if not is_causal(mask):
            raise ValueError(
                "mask must be causal for generation, since a new token cannot see later ones; got one with live scores "
                "above the diagonal. Build it with causal=True, or combine it: mask & masks.causal(n)."
            )
        found: BlockMask = self._made.put(key, mask)
        return found

    @staticmethod
    def _fits(mask: BlockMask, q_len: int, k_len: int, device: torch.device) -> bool:
        return mask.q_len == q_len and mask.k_len == k_len and mask.device == device

    def _for(self, q_len: int, k_len: int) -> BlockMask:
        if not isinstance(self.given, BlockMask):
            return mask_of_lengths(self.given, q_len, k_len)
        if self._fits(self.given, q_len, k_len, self.given.device):
            return self.given
        if self.given.q_len < q_len or self.given.k_len < k_len:
            raise ValueError(
                f"mask must be for at least {q_len} queries and {k_len} keys, as given; it is for {self.given.q_len} "
                f"and {self.given.k_len}. For any lengths pass a function that returns a mask, such as masks.causal."
            )
        return self.given.crop(q=(0, q_len), k=(0, k_len))
