"""A causal transformer in GPT-2's shape: pre-norm, GELU, tied embedding and head, no biases.

Weights are fp32; the embedding sets the dtype of products and of the residual stream.

Shapes: B sequences, N tokens of context (of this process, if several share them), T = B * N, W width, H heads,
    Hkv heads of keys and values, D features a head, V vocabulary with padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from experiments.lm.flops import matrix_weights
from experiments.lm.model.attention import Attention
from experiments.lm.model.chosen import Choosing, ChosenBlocks
from experiments.lm.model.loss import mean_loss, token_losses
from experiments.lm.model.shared_context import SharedContext
from experiments.training.layers.rotary import RotaryPositions
from sparseflash.nn.rotary import Rotation, rotate

POSITIONS = ("rotary", "learned")
_GRAPHS = 64


@dataclass(frozen=True)
class Sizes:
    depth: int
    width: int
    head_dim: int
    vocabulary: int
    context: int
    positions: str = "rotary"
    kv_heads: int | None = None

    def __post_init__(self) -> None:
        if self.width % self.head_dim:
            raise ValueError(
                f"width must be a multiple of head_dim; got width {self.width}, head_dim {self.head_dim}: choose "
                "another --head-dim"
            )
        if self.heads % self.key_heads:
            raise ValueError(
                f"kv_heads must divide the {self.heads} heads; got {self.kv_heads}: choose another --kv-heads"
            )
        if self.positions not in POSITIONS:
            raise ValueError(f"positions must be one of {', '.join(POSITIONS)}; got {self.positions!r}")

    @property
    def heads(self) -> int:
        return self.width // self.head_dim

    @property
    def key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def kv_width(self) -> int:
        return self.key_heads * self.head_dim

    @property
    def mlp(self) -> int:
        return 4 * self.width

    @property
    def padded_vocabulary(self) -> int:
        """The next multiple of 128, for matrix products."""
        return -(-self.vocabulary // 128) * 128

    @property
    def weights(self) -> int:
        return matrix_weights(self.depth, self.width, self.kv_width, self.mlp, self.padded_vocabulary)


class Block(nn.Module):
    def __init__(self, sizes: Sizes, halves: Halves, recompute: bool = False) -> None:
        super().__init__()
        width = sizes.width
        self.head_dim, self.halves, self.recompute = sizes.head_dim, halves, recompute
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, width + 2 * sizes.kv_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, sizes.mlp, bias=False)
        self.down = nn.Linear(sizes.mlp, width, bias=False)
        self.choosing: Choosing | None = None

    def forward(self, x: Tensor, batch: int, rotation: Rotation | None, attention: Attention) -> Tensor:
        """x [T, W], of `batch` sequences."""
        if self.recompute and torch.is_grad_enabled():
            # FSDP gathers weights before the backward that recomputes them.
            again: Tensor = checkpoint(
                self.layer, x, batch, rotation, attention, use_reentrant=False, preserve_rng_state=False
            )
            return again
        return self.layer(x, batch, rotation, attention)

    def layer(self, x: Tensor, batch: int, rotation: Rotation | None, attention: Attention) -> Tensor:
        parts = self.halves.before(x, self.attention_norm.weight, self.qkv.weight, self.head_dim, rotation)
        q, k, v = (each.unflatten(0, (batch, -1)).transpose(1, 2) for each in parts)  # [B, H or Hkv, N, D]
        if isinstance(attention, Choosing):
            normed = norm(x, self.attention_norm.weight).unflatten(0, (batch, -1))
            # From heads [T, H, D] to [B, H, N, D].
            of_heads = None if rotation is None else rotation.unflatten(0, (batch, -1)).transpose(1, 2)
            out = attention(normed, q, k, v, of_heads)
        else:
            assert not isinstance(attention, ChosenBlocks), "see LanguageModel.made"
            out = attention(q, k, v)
        mixed = out.transpose(1, 2).reshape(x.shape)
        weights = (self.out.weight, self.mlp_norm.weight, self.up.weight, self.down.weight)
        return self.halves.after(x, mixed, *weights)


def product(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Without bias; statistics are in fp32."""
    return F.layer_norm(x, weight.shape, weight.to(x.dtype))


def before_attention(
    x: Tensor, norm_weight: Tensor, qkv: Tensor, head_dim: int, rotation: Rotation | None
) -> tuple[Tensor, Tensor, Tensor]:
    heads = x.shape[1] // head_dim
    key_heads = (len(qkv) // head_dim - heads) // 2
    made = product(norm(x, norm_weight), qkv).unflatten(-1, (-1, head_dim))
    both, v = made.split([heads + key_heads, key_heads], 1)
    q, k = (both if rotation is None else rotate(both, rotation)).split([heads, key_heads], 1)
    return q.contiguous(), k.contiguous(), v.contiguous()


def after_attention(x: Tensor, mixed: Tensor, out: Tensor, norm_weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    x = x + product(mixed, out)
    hidden = F.gelu(product(norm(x, norm_weight), up), approximate="tanh")
    return x + product(hidden, down)


class Halves(NamedTuple):
    before: Callable[..., tuple[Tensor, Tensor, Tensor]] = before_attention
    after: Callable[..., Tensor] = after_attention


def compiled(function: Callable[..., object]) -> Callable[..., object]:
    torch._dynamo.config.recompile_limit = max(_GRAPHS, torch._dynamo.config.recompile_limit)
    return torch.compile(function, fullgraph=True, dynamic=False)


class LanguageModel(nn.Module):
    """attentions: of each layer, or empty until they are set. dtype: of the residual stream and products. compiling:
    "none"; "block": the two halves of a layer around attention, one pair of graphs for all layers; "model": all layers
    and the last norm as one graph. recompute: each layer from its input. shared: this process's tokens.
    """

    def __init__(
        self,
        sizes: Sizes,
        attentions: Sequence[Attention],
        *,
        dtype: torch.dtype = torch.float32,
        compiling: str = "none",
        recompute: bool = False,
        shared: SharedContext | None = None,
    ) -> None:
        super().__init__()
        self.sizes, self.dtype, self.shared = sizes, dtype, shared
        halves, self.run = Halves(), self.trunk
        if compiling == "block":
            halves = Halves(compiled(before_attention), compiled(after_attention))  # type: ignore[arg-type]
        if compiling == "model":
            self.run = compiled(self.trunk)  # type: ignore[assignment]
        self.embedding = nn.Embedding(sizes.padded_vocabulary, sizes.width)
        self.places: nn.Embedding | None = None
        self.rotary: RotaryPositions | None = None
        if sizes.positions == "learned":
            self.places = nn.Embedding(sizes.context, sizes.width)
        else:
            self.rotary = RotaryPositions(sizes.head_dim, None, 0)
        self.blocks = nn.ModuleList(Block(sizes, halves, recompute) for _ in range(sizes.depth))
        self.norm = nn.LayerNorm(sizes.width, bias=False)
        self.initialize()
        self.attentions = tuple(self.made(attention) for attention in attentions)
        for block, attention in zip(self.blocks if attentions else (), self.attentions, strict=True):
            if isinstance(attention, Choosing):
                block.choosing = attention

    def made(self, attention: Attention) -> Attention:
        if not isinstance(attention, ChosenBlocks):
            return attention
        sizes = self.sizes
        return attention.layer(sizes.width, sizes.heads, sizes.key_heads, sizes.head_dim)

    def initialize(self) -> None:
        """GPT-2's: projections into the residual stream start smaller."""
        small = 0.02 / (2 * self.sizes.depth) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=small if name.endswith(("out.weight", "down.weight")) else 0.02)

    def features(self, ids: Tensor, attentions: Sequence[Attention], places: Tensor | None = None) -> Tensor:
        """places: of the tokens [N], if the attentions remember those before them.

        The embeddings are never compiled: Inductor would sum gradients of equal tokens by atomic additions.
        """
        batch, length = ids.shape
        if places is None and self.shared is not None:
            places = self.shared.positions(ids.device)
        places = (torch.arange(length, device=ids.device) if places is None else places).repeat(batch)
        x = self.embedding(ids.flatten()).to(self.dtype)
        if self.places is not None:
            x = x + self.places(places).to(self.dtype)
        return self.run(x, places, batch, attentions)

    def trunk(self, x: Tensor, places: Tensor, batch: int, attentions: Sequence[Attention]) -> Tensor:
        rotation = None if self.rotary is None else self.rotary(places)  # of [T, H, D]
        for block, attention in zip(self.blocks, attentions, strict=True):
            x = block(x, batch, rotation, attention)
        return norm(x, self.norm.weight)

    def forward(
        self, ids: Tensor, labels: Tensor, attentions: Sequence[Attention] | None = None, each: bool = False
    ) -> Tensor:
        """If sequences are shared, each process returns its tokens' part: the mean over processes is the mean loss.

        attentions: instead of the model's own, for separate documents. each: the loss of each token, [B, N], without
        gradients; an argument, because FSDP gathers weights when `forward` is called.
        """
        if self.shared is not None:
            ids, labels = self.shared.scatter(ids), self.shared.scatter(labels)
        attentions = attentions or self.attentions
        features = self.features(ids, attentions)
        if each:
            found = token_losses(features, self.embedding.weight, labels.flatten()).view_as(ids)
            return found if self.shared is None else self.shared.gather(found)
        loss = mean_loss(features, self.embedding.weight, labels.flatten())
        if self.training and torch.is_grad_enabled():
            for attention in attentions:
                if isinstance(attention, Choosing) and (taught := attention.loss) is not None:
                    loss = loss + (taught - taught.detach())  # the value is the loss of the text alone
        return loss if self.shared is None else loss * self.shared.share

    @torch.no_grad()
    def scores(self, ids: Tensor, place: int) -> Tensor:
        """[B, V] after a position of ids [B, N]; -inf for padding."""
        features = self.features(ids, self.attentions).unflatten(0, ids.shape)[:, place]
        found = product(features, self.embedding.weight).float()
        found[:, self.sizes.vocabulary :] = -torch.inf
        return found
