"""A pre-LN transformer encoder whose layers each attend through their own mask.

Shapes: B sequences, N positions (padded), H heads, W width, D features a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.lra.attend import IMPLEMENTATIONS, Live, attend
from experiments.lra.positions import POSITIONS, Brackets, Nesting, Turns, sinusoids, turned
from sparseflash import BlockMask

Turn = tuple[Tensor, Tensor]  # see positions.Turns
_GRAPHS = 64  # of each half: the table has models of five tasks by five variants in one process


class RMSNorm(nn.RMSNorm):
    """PyTorch's, whose one kernel wants the weight in the input's dtype: autocast leaves them apart, and it says so."""

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class SelfAttention(nn.Module):
    """Multi-head self-attention over the live scores of a mask."""

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int,
        dropout: float,
        qk_norm: bool,
        implementation: str = "sparseflash",
    ) -> None:
        super().__init__()
        self.heads = heads
        self.implementation = implementation
        self.dropout = dropout  # of the weights
        self.qkv = nn.Linear(width, 3 * heads * head_dim)
        self.out = nn.Linear(heads * head_dim, width)
        self.q_norm: nn.Module = RMSNorm(head_dim) if qk_norm else nn.Identity()
        self.k_norm: nn.Module = RMSNorm(head_dim) if qk_norm else nn.Identity()

    def project(self, x: Tensor, turn: Turn | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each [B, H, N, D]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [3, B, H, N, D]
        q, k = self.q_norm(q), self.k_norm(k)
        if turn is not None:
            q, k = turned(q, turn), turned(k, turn)
        return q.to(v.dtype), k.to(v.dtype), v  # autocast has its own idea of a norm's dtype

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Live) -> Tensor:
        """Attention [B, H, N, D]."""
        return attend(self.implementation, q, k, v, mask, dropout_p=self.dropout if self.training else 0.0)


class Layer(nn.Module):
    """What a layer has: attention, then an MLP, each on the normalised input and added to it."""

    def __init__(self, width: int, mlp: int, dropout: float, attention: SelfAttention) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = attention
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, mlp), nn.GELU(), nn.Dropout(dropout), nn.Linear(mlp, width))
        self.dropout = nn.Dropout(dropout)


def before_attention(layer: Layer, x: Tensor, turn: Turn | None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [B, H, N, D] of a layer."""
    return layer.attention.project(layer.attention_norm(x), turn)


def after_attention(layer: Layer, x: Tensor, mixed: Tensor) -> Tensor:
    """The layer's output [B, N, W] from its input and its attention [B, H, N, D]."""
    x = x + layer.dropout(layer.attention.out(mixed.transpose(1, 2).flatten(2)))
    result: Tensor = x + layer.dropout(layer.mlp(layer.mlp_norm(x)))
    return result


class Halves(NamedTuple):
    """What surrounds the attention of a layer."""

    before: Callable[[Layer, Tensor, Turn | None], tuple[Tensor, Tensor, Tensor]] = before_attention
    after: Callable[[Layer, Tensor, Tensor], Tensor] = after_attention


def compiled_halves() -> Halves:
    """The same through torch.compile, which fuses them; attention is one kernel already.

    All layers of a model share two graphs: a pair for the first shape of a batch, and one for all others. Every further
    width, precision and dropout of a process has graphs of its own; past the limit it is an error, and not slow.
    """
    torch._dynamo.config.recompile_limit = max(_GRAPHS, torch._dynamo.config.recompile_limit)
    return Halves(torch.compile(before_attention, fullgraph=True), torch.compile(after_attention, fullgraph=True))


class Encoder(nn.Module):
    """Embedding, positions, layers and a norm.

    masks: one for each layer, for the longest batch, on the device where the model will run.
    places: how many places there are; more than the mask's length where batches leave tokens out.
    first: the place where an example's own tokens begin; 1 where [CLS] stands before them.
    side: pixels along a side, of images.
    brackets: of expressions; positions "nested" need them.
    attention: who computes it; see attend.py.
    """

    def __init__(
        self,
        masks: Sequence[BlockMask],
        *,
        vocabulary: int,
        width: int,
        heads: int,
        head_dim: int | None = None,
        mlp: int,
        dropout: float,
        attention_dropout: float = 0.0,
        positions: str,
        places: int = 0,
        first: int = 0,
        side: int | None = None,
        brackets: Brackets | None = None,
        qk_norm: bool = False,
        attention: str = "sparseflash",
    ) -> None:
        super().__init__()
        if attention not in IMPLEMENTATIONS:
            raise ValueError(f"attention must be one of {', '.join(IMPLEMENTATIONS)}; got {attention!r}")
        if head_dim is None and width % heads:
            raise ValueError(f"width must be a multiple of heads; got width {width}, heads {heads}")
        if positions not in POSITIONS:
            raise ValueError(f"positions must be one of {', '.join(POSITIONS)}; got {positions!r}")
        head_dim = head_dim or width // heads
        self.masks = tuple(masks)
        self._cropped: dict[tuple[int, int], BlockMask] = {}
        self._patterns: dict[int, Tensor | None] = {}
        self.attention = attention
        places = max(places, self.masks[0].q_len)
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.positions: Tensor | nn.Parameter | None = None
        self.turns: Turns | None = None
        self.nesting: Nesting | None = None
        if positions == "learned":
            self.positions = nn.Parameter(torch.randn(places, width) * width**-0.5)
        elif positions == "sinusoidal":
            del self.positions
            self.register_buffer("positions", sinusoids(places, width), persistent=False)
        else:
            self.turns = Turns(head_dim, side if positions == "rotary2d" else None, first)
        if positions == "nested":
            if brackets is None:
                raise ValueError("positions=nested needs to know which ids are brackets; got none")
            self.nesting = Nesting(brackets, vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            Layer(width, mlp, dropout, SelfAttention(width, heads, head_dim, attention_dropout, qk_norm, attention))
            for _ in self.masks
        )
        self.norm = nn.LayerNorm(width)
        self.training_halves = Halves()

    def compile_layers(self) -> None:
        """Let torch.compile fuse what surrounds attention in training. Where answers alone are asked for nothing is."""
        self.training_halves = compiled_halves()

    def encode(self, ids: Tensor, lengths: Tensor, places: Tensor | None = None, padded: bool = True) -> Tensor:
        """Features [B, N, W] of ids [B, N]; positions at or past lengths [B] are padding and take no part.

        places: where the tokens stood before some were left out, [B, N]; None: none was.
        padded: False promises that there is no padding.
        """
        x = self.embedding(ids)
        if self.positions is not None:
            # Not positions[places]: its gradient adds up a place's tokens one after the other, and padding has them all
            # in one place.
            x = x + (self.positions[: ids.shape[1]] if places is None else F.embedding(places, self.positions))
        if self.nesting is not None:
            x = x + self.nesting(ids)
        turn = None
        if self.turns is not None:
            turn = self.turns(torch.arange(ids.shape[1], device=ids.device)[None] if places is None else places)
        x = self.dropout(x)
        masks: Sequence[BlockMask | Live]
        if self.attention == "sparseflash":
            masks = self.masks_for(ids.shape[1], lengths)
        else:
            masks = self.live_for(ids.shape[1], lengths if padded else None)
        halves = self.training_halves if self.training else Halves()
        for layer, mask in zip(self.layers, masks, strict=True):
            q, k, v = halves.before(layer, x, turn)
            x = halves.after(layer, x, layer.attention.mix(q, k, v, mask))
        features: Tensor = self.norm(x)
        return features

    def masks_for(self, length: int, lengths: Tensor) -> list[BlockMask]:
        """Each layer's mask for a batch of `length` positions, with its padding.

        Layers that share a mask share the plan that the library derives for this batch's lengths.
        """
        padded: dict[int, BlockMask] = {}
        for mask in self.masks:
            key = (id(mask), length)
            if key not in self._cropped:
                # It is kept for training, too, where autograd would refuse tensors made in inference mode.
                with torch.inference_mode(False):
                    whole = length == mask.q_len
                    self._cropped[key] = mask if whole else mask.crop(q=(0, length), k=(0, length))
            if id(mask) not in padded:
                padded[id(mask)] = self._cropped[key].with_lengths(lengths)
        return [padded[id(mask)] for mask in self.masks]

    def live_for(self, length: int, lengths: Tensor | None) -> list[Live]:
        """The same for the implementations without block masks; no lengths: there is no padding."""
        found: dict[int, Live] = {}
        for mask in self.masks:
            if id(mask) not in self._patterns:
                with torch.inference_mode(False):
                    self._patterns[id(mask)] = None if mask.density == 1 else mask.to_dense()
            if id(mask) not in found:
                pattern = self._patterns[id(mask)]
                pattern = pattern[..., :length, :length] if pattern is not None else None
                found[id(mask)] = Live.within(pattern, lengths, length)
        return [found[id(mask)] for mask in self.masks]
