"""Attention of a language model's layers while it generates: keys and values of earlier tokens are kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import sparseflash
from experiments.lm.model.chosen import Choosing
from experiments.lm.model.transformer import LanguageModel, product
from sparseflash import masks
from sparseflash.decode import attention_with_cache
from sparseflash.nn.kv_cache import KVCache, length_on_host
from sparseflash.nn.rotary import Rotation
from sparseflash.selection.frame import Frame


class Remembered:
    """Attention to all earlier tokens, or to the last `window`.

    frame: where the tokens of a call are, the same for all layers: see `next_scores`.
    """

    frame: Frame

    def __init__(self, cache: KVCache, window: int | None, block: int) -> None:
        self.cache, self.window, self.block = cache, window, block

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A prompt, which begins the sequence, or one token after it."""
        tokens, cache, lengths = q.shape[2], self.cache, self.frame.lengths
        cache.append(k, v, self.frame.new_places)
        if lengths is not None:
            out: Tensor = attention_with_cache(q, cache.k, cache.v, lengths, window=self.window)
            return out
        mask = masks.causal(tokens, block=self.block)
        if self.window is not None and self.window < tokens:
            mask = masks.local(tokens, window=self.window, causal=True, block=self.block)
        prompt: Tensor = sparseflash.attention(q, k, v, mask.to(q.device))
        return prompt


class RememberedChoosing(Choosing):
    """A layer that chooses blocks among all earlier tokens. frame: as of `Remembered`."""

    frame: Frame

    def __init__(self, choosing: Choosing, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.layer = choosing.layer
        self.cache = self.layer.new_cache(batch, capacity, device=device, dtype=dtype)

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
        pairs = self.layer.pairs
        if pairs > 1:
            k, v = k.repeat(1, pairs, 1, 1), v.repeat(1, pairs, 1, 1)
        frame = self.frame._replace(rotation=rotation)
        self.cache.append(k, v, frame.new_places)
        room = slice(frame.k_len)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.dtype == torch.bfloat16):
            mixed = self.layer.mix(x, q, self.cache.k[:, :, room], self.cache.v[:, :, room], frame, self.cache)
        return mixed.to(x.dtype)


Layer = Remembered | RememberedChoosing


def remembered(
    model: LanguageModel, patterns: Sequence[str], batch: int, capacity: int, *, window: int, block: int
) -> list[Layer]:
    """Attention with a cache for each layer, with room for `capacity` tokens of each sequence.

    patterns: for each layer "dense", "local" or a pattern of chosen blocks.
    """
    device, sizes = model.embedding.weight.device, model.sizes
    made: list[Layer] = []
    for pattern, attention in zip(patterns, model.attentions, strict=True):
        if isinstance(attention, Choosing):
            made.append(RememberedChoosing(attention, batch, capacity, device, model.dtype))
            continue
        if pattern not in ("dense", "local"):
            raise ValueError(
                f"patterns must be dense, local or of chosen blocks to generate with a cache; got {pattern}"
            )
        cache = KVCache(batch, sizes.key_heads, capacity, sizes.head_dim, device=device, dtype=model.dtype)
        made.append(Remembered(cache, window if pattern == "local" else None, block))
    return made


def cast_weights(model: LanguageModel) -> None:
    """Casts the weights to the dtype that the model computes in, which every token would do anew. Scores keep their
    bits: an indexer's norms, which compute in the dtype of their weights, are left.
    """
    for module in model.modules():
        for x in () if isinstance(module, nn.RMSNorm) else module.parameters(recurse=False):
            x.data = x.data.to(model.dtype)


def put_row(whole: Sequence[Layer], row: int, one: Sequence[Layer]) -> None:
    """Copies the caches of one sequence into a row of the caches of several, all of the same length."""
    for there, here in zip(whole, one, strict=True):
        mine, its = there.cache, here.cache
        pairs = [(mine.k, its.k), (mine.v, its.v)]
        pairs += [(getattr(mine, "more", {})[name], each) for name, each in getattr(its, "more", {}).items()]
        for into, each in pairs:
            into[row, :, : each.shape[2]] = each[0]
        mine.length = its.length


def next_scores(model: LanguageModel, ids: Tensor, attentions: Sequence[Layer]) -> Tensor:
    """Scores [B, V] after ids [B, N], the tokens that follow those in the caches, which are equally long."""
    cache, tokens = attentions[0].cache, ids.shape[1]
    frame = Frame.after(cache) if tokens == 1 else Frame(length_on_host(cache), tokens, ids.device)
    for each in attentions:
        each.frame = frame
    features = model.features(ids, attentions, frame.new_places).unflatten(0, ids.shape)[:, -1]
    return product(features, model.embedding.weight).float()[:, : model.sizes.vocabulary]
