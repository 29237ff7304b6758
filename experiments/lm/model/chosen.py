"""Blocks of keys chosen at every step, by layers of `sparseflash.selection`: MoBA, MSA and NSA.

The model's own projections make queries, keys and values, so a dense model can be continued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparseflash import selection
from sparseflash.nn.rotary import Rotation
from sparseflash.selection.frame import Frame

KINDS = ("moba", "msa", "nsa")
TAUGHT = 256  # queries of a forward that teach an indexer


@dataclass(frozen=True)
class ChosenBlocks:
    """A layer whose queries choose among the blocks before them, in place of attention.

    moba: the blocks whose mean keys a query likes best. msa: those that an indexer scores by their best key. nsa: those
    with the largest weights of compressed keys, and near keys, half of the tokens each. A query's own block is always
    chosen.
    """

    length: int
    block: int
    chosen: int
    kind: str = "moba"

    @property
    def q_len(self) -> int:
        return self.length

    @property
    def k_len(self) -> int:
        return self.length

    @property
    def density(self) -> float:
        places = range(0, self.length, self.block)
        whole = sum(min(self._blocks - 1, place // self.block) * self.block * self.block for place in places)
        live = whole + len(places) * self.block * (self.block + 1) / 2
        if self.kind == "nsa":
            near, step = min(self._near, self.length), self.block // 4
            live += near * (near + 1) / 2 + (self.length - near) * near
            live += sum(max(0, (place + 1 - 2 * step) // step + 1) for place in range(self.length))
        return live / self.length**2

    @property
    def _near(self) -> int:
        return max(1, self.chosen * self.block // 2)

    @property
    def _blocks(self) -> int:
        return max(1, self.chosen // 2) if self.kind == "nsa" else self.chosen

    def to(self, device: torch.device | str) -> ChosenBlocks:
        return self

    def layer(self, width: int, heads: int, kv_heads: int, head_dim: int) -> Choosing:
        sizes: dict[str, Any] = {
            "kv_heads": kv_heads, "head_dim": head_dim, "block": self.block, "chosen": self._blocks,
        }  # fmt: skip
        if self.kind == "msa":
            return Choosing(selection.BlockSelection(width, heads, index_dim=head_dim, taught=TAUGHT, **sizes))
        if self.kind == "moba":
            return Choosing(selection.MixtureOfBlocks(width, heads, **sizes))
        first, last = (1, 2) if self._blocks > 3 else (0, 1)
        sizes |= {"compression": self.block // 2, "stride": self.block // 4, "first": first, "last": last}
        native = selection.NativeSparseAttention(width, heads, window=self._near, **sizes)
        with torch.no_grad():
            native.gate.weight.zero_()
            native.gate.bias.view(3, -1).copy_(native.gate.bias.new_tensor([[-2.0], [2.0], [-2.0]]).expand(3, heads))
        return Choosing(native)


class Choices(NamedTuple):
    """The blocks of `block` tokens that each query of each head or group has chosen, [B, H, N, K]."""

    block: int
    index: Tensor


class Choosing(nn.Module):
    """A layer of `sparseflash.selection` without its projections. NSA's three branches share keys and values.

    `loss`: the indexer's, of the last forward in training; None without an indexer.
    """

    def __init__(self, layer: selection.MixtureOfBlocks | selection.BlockSelection | selection.NativeSparseAttention):
        super().__init__()
        layer.qkv = layer.out = None  # type: ignore[assignment]
        self.layer = layer

    @property
    def loss(self) -> Tensor | None:
        found: Tensor | None = getattr(self.layer, "loss", None)
        return found

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
        """Attention `[B, H, N, D]` of q to k and v `[B, Hkv, N, D]`; the layer chooses from x `[B, N, W]`.

        rotation: that of q and k, for an indexer's.
        """
        pairs = self.layer.pairs
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.dtype == torch.bfloat16):
            frame = Frame(0, x.shape[1], x.device, rotation=rotation)
            mixed = self.layer.mix(x, q, k.repeat(1, pairs, 1, 1), v.repeat(1, pairs, 1, 1), frame, None)
        return mixed.to(x.dtype)


@contextmanager
def choices_kept(model: nn.Module) -> Iterator[list[Choices]]:
    """Collects what each layer chooses while the `with` block runs, in the order of the layers."""
    found: list[Choices] = []
    layers = [each.layer for each in model.modules() if isinstance(each, Choosing)]

    def keeping(layer: Any, choose: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def choice(*inputs: Any) -> Tensor:
            index = choose(*inputs)
            found.append(Choices(layer.block, index))
            return index

        return choice

    for layer in layers:
        layer.choice = keeping(layer, layer.choice)  # type: ignore[method-assign]
    try:
        yield found
    finally:
        for layer in layers:
            del layer.choice  # the method of the class is called again
