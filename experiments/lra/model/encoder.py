"""A pre-norm transformer encoder with a mask for each layer.

Shapes: B sequences, N positions (padded), W width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.lra.model.positions import OF_BRACKETS, POSITIONS, Brackets, Nesting, TreeRotation, sinusoids
from experiments.training.distributed import Ranks
from experiments.training.layers.attention import IMPLEMENTATIONS, ElementMask
from experiments.training.layers.rotary import RotaryPositions, Rotations
from experiments.training.layers.transformer import (
    DepthwiseConvolution,
    Halves,
    Layer,
    SelfAttention,
    compiled_halves,
    head_dim_of,
)
from experiments.training.shared_sequences import SharedSequences
from sparseflash import BlockMask
from sparseflash.distributed import ShardPlan
from sparseflash.nn.rotary import Rotation


def convolved(convolution: DepthwiseConvolution, x: Tensor, live: Tensor | None) -> Tensor:
    return convolution.forward(x, live)


class Brightness(nn.Module):
    """Pixels as a learned line: a vector times the brightness, from -1 to 1, and another vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.randn(width) * width**-0.5)
        self.middle = nn.Parameter(torch.randn(width) * width**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, N, W] of ids [B, N], 1 for black to 256 for white."""
        return torch.addcmul(self.middle, ((ids - 1) / 127.5 - 1)[..., None], self.slope)


class Encoder(nn.Module):
    """Embedding, positions, layers and a norm.

    places: the number of positions; above the mask's length if batches drop tokens.
    brackets: ids of brackets, for positions "nested" and "tree".
    attention: the implementation; see experiments/training/layers/attention.py.
    encoding: "tokens", or "brightness" of pixels, see Brightness.
    convolution: tokens, or pixels along a side, of the window of a convolution after the embedding and in each layer.
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
        encoding: str = "tokens",
        convolution: int = 0,
    ) -> None:
        super().__init__()
        if attention not in IMPLEMENTATIONS:
            raise ValueError(f"attention must be one of {', '.join(IMPLEMENTATIONS)}; got {attention!r}")
        head_dim = head_dim_of(width, heads, head_dim)
        if positions not in POSITIONS:
            raise ValueError(f"positions must be one of {', '.join(POSITIONS)}; got {positions!r}")
        self.masks = tuple(masks)
        self._cropped: dict[tuple[int, int], BlockMask] = {}
        self._patterns: dict[int, Tensor | None] = {}
        self.attention = attention
        places = max(places, self.masks[0].q_len)
        self.embedding: nn.Module
        if encoding == "brightness":
            self.embedding = Brightness(width)
        else:
            self.embedding = nn.Embedding(vocabulary, width)
            nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.positions: Tensor | nn.Parameter | None = None
        self.rotary: RotaryPositions | None = None
        self.nesting: Nesting | None = None
        self.tree: TreeRotation | None = None
        if positions == "learned":
            self.positions = nn.Parameter(torch.randn(places, width) * width**-0.5)
        elif positions == "sinusoidal":
            del self.positions
            self.register_buffer("positions", sinusoids(places, width), persistent=False)
        elif positions == "tree":
            self.tree = TreeRotation(heads, head_dim)
        else:
            self.rotary = RotaryPositions(head_dim, side if positions == "rotary2d" else None, first)
        if positions in OF_BRACKETS:
            if brackets is None:
                raise ValueError(f"positions={positions} needs to know which ids are brackets; got none")
            self.nesting = Nesting(brackets, vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            Layer(
                width,
                mlp,
                dropout,
                SelfAttention(width, heads, head_dim, attention_dropout, qk_norm, attention),
                DepthwiseConvolution(width, convolution, side) if convolution else None,
            )
            for _ in self.masks
        )
        if self.tree is not None:
            for layer in self.layers:
                self.tree.begin(layer.attention)
        self.stem = DepthwiseConvolution(width, convolution, side) if convolution else None
        self.norm = nn.LayerNorm(width)
        self.training_halves = Halves()
        self.training_stem: Callable[[DepthwiseConvolution, Tensor, Tensor | None], Tensor] = convolved
        self.shared: SharedSequences | None = None

    def compile_layers(self) -> None:
        self.training_halves = compiled_halves()
        self.training_stem = torch.compile(convolved, fullgraph=True)

    def share_sequences(self, ranks: Ranks) -> SharedSequences:
        """Among the processes of `ranks` with the same share of a batch. All return the same features; the mean of
        their gradients is the gradient."""
        self.shared = SharedSequences(ranks)
        return self.shared

    def encode(self, ids: Tensor, lengths: Tensor, places: Tensor | None = None, padded: bool = True) -> Tensor:
        """Features [B, N, W] of ids [B, N]; positions from lengths [B] on are padding.

        places: original indices of the tokens, [B, N], if some were dropped. padded: False promises no padding.
        """
        length = ids.shape[1]
        depths = None if self.nesting is None else self.nesting.depths(ids)
        parents = None if self.tree is None or self.nesting is None else self.nesting.parents(ids, depths)
        layout = None
        if self.shared is not None:
            layout = self.shared.plan(self.cropped(self.masks[0], length))
            places = layout.positions.to(ids.device)[None] if places is None else layout.scatter(places, -1)
            ids = layout.scatter(ids, -1)
            depths = None if depths is None else layout.scatter(depths, -1)
            parents = None if parents is None else layout.scatter(parents, -1)
        x = self.embedding(ids)
        if self.positions is not None:
            # Indexing's gradient would add tokens with equal positions serially.
            x = x + (self.positions[:length] if places is None else F.embedding(places, self.positions))
        if self.nesting is not None and depths is not None:
            x = x + self.nesting(depths)
        rotation: Rotation | Rotations | None = None
        if self.rotary is not None or self.tree is not None:
            own = torch.arange(length, device=ids.device)[None] if places is None else places
            rotation = self.rotary(own) if self.tree is None else self.tree(own, parents)
        live = None
        if self.stem is not None:
            live = (torch.arange(length, device=ids.device) < lengths[:, None])[..., None] if padded else None
            x = (self.training_stem if self.training else convolved)(self.stem, x, live)
        x = self.dropout(x)
        masks: Sequence[BlockMask | ShardPlan | ElementMask]
        if layout is not None:
            masks = self.plans_for(layout, lengths if padded else None)
        elif self.attention == "sparseflash":
            masks = self.masks_for(length, lengths)
        else:
            masks = self.element_masks_for(length, lengths if padded else None)
        halves = self.training_halves if self.training else Halves()
        for layer, mask in zip(self.layers, masks, strict=True):
            q, k, v = halves.before(layer, x, rotation)
            x = halves.after(layer, x, layer.attention.mix(q, k, v, mask), live)
        features: Tensor = self.norm(x)
        return features if self.shared is None or layout is None else self.shared.gather(features, layout)

    def cropped(self, mask: BlockMask, length: int) -> BlockMask:
        key = (id(mask), length)
        if key not in self._cropped:
            # Autograd refuses tensors of inference mode.
            with torch.inference_mode(False):
                whole = length == mask.q_len
                self._cropped[key] = mask if whole else mask.crop(q=(0, length), k=(0, length))
        return self._cropped[key]

    def masks_for(self, length: int, lengths: Tensor) -> list[BlockMask]:
        padded: dict[int, BlockMask] = {}
        for mask in self.masks:
            if id(mask) not in padded:
                padded[id(mask)] = self.cropped(mask, length).with_lengths(lengths)
        return [padded[id(mask)] for mask in self.masks]

    def plans_for(self, layout: ShardPlan, lengths: Tensor | None) -> list[ShardPlan]:
        """If several processes share the tokens. lengths: None without padding."""
        assert self.shared is not None
        found: dict[int, ShardPlan] = {}
        for mask in self.masks:
            if id(mask) not in found:
                plan = self.shared.plan(self.cropped(mask, layout.queries.length), like=layout)
                found[id(mask)] = plan if lengths is None else self.shared.padded(plan, lengths)
        return [found[id(mask)] for mask in self.masks]

    def element_masks_for(self, length: int, lengths: Tensor | None) -> list[ElementMask]:
        """lengths: None without padding."""
        found: dict[int, ElementMask] = {}
        for mask in self.masks:
            if id(mask) not in self._patterns:
                with torch.inference_mode(False):
                    self._patterns[id(mask)] = None if mask.density == 1 else mask.to_dense()
            if id(mask) not in found:
                pattern = self._patterns[id(mask)]
                pattern = pattern[..., :length, :length] if pattern is not None else None
                found[id(mask)] = ElementMask.within(pattern, lengths, length)
        return [found[id(mask)] for mask in self.masks]
