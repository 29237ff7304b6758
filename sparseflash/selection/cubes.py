"""Where the tokens of videos lie in cube order, and the tokens of texts before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import check_at_least_one, integer
from sparseflash.masks.documents import documents

Shape = tuple[int, int, int]


class Cubes(NamedTuple):
    """Texts, then videos in cube order, every text and cube with room for whole blocks of tokens.

    places: of the tokens, int64 `[N]`. sources: the token of each place, int64; None if there is room. number: 1 + the
    cube of each token, 0 for text, int64 `[N]`. sizes: tokens of each cube `[cubes]`. bounds: where the video of each
    cube begins and ends, int32 `[2, cubes]`; None for one video. text: room of all texts. blocks: the blocks of text
    that each cube sees, int32 `[cubes, most]`, -1 for none. padding: 0 at tokens and -inf at room `[1, 1, text +
    room]`; None if there is no room. within: each video for itself. beside: of texts, each with its video.
    """

    places: Tensor
    sources: Tensor | None
    number: Tensor
    sizes: Tensor
    bounds: Tensor | None
    text: int
    blocks: Tensor
    padding: Tensor | None
    within: BlockMask | None
    beside: BlockMask | None

    def spread(self, x: Tensor, volume: int) -> Tensor:
        """`[B, H, N, D]` to `[B, H, text + room, D]`, zeros where there is no token."""
        if self.sources is not None:
            return reordered(x, self.sources, self.places)
        room = self.text + len(self.sizes) * volume
        return x.new_zeros(*x.shape[:2], room, x.shape[3]).index_copy(2, self.places, x)

    def collect(self, x: Tensor) -> Tensor:
        """`[B, H, text + room, D]` back to `[B, H, N, D]`."""
        return x.index_select(2, self.places) if self.sources is None else reordered(x, self.places, self.sources)

    def of_tokens(self, x: Tensor, volume: int) -> Tensor:
        """The rows `[B, H, cubes, D]` of the cubes of all tokens, `[B, H, N, D]`; 0 for text."""
        if self.sources is not None and self.text == 0:
            return self.collect(x.unsqueeze(3).expand(-1, -1, -1, volume, -1).flatten(2, 3))
        return F.pad(x, (0, 0, 1, 0)).index_select(2, self.number)


def reordered(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """The rows `[B, H, N, D]` in another order. Its gradient is gathered, too, by the inverse order."""
    if torch.compiler.is_compiling():  # Dynamo warns of functions with gradients of their own in PyTorch 2.11
        return x.index_select(2, order)
    found: Tensor = _Reordered.apply(x, order, inverse)  # type: ignore[no-untyped-call]
    return found


class _Reordered(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        return x.index_select(2, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        order, inverse = ctx.saved_tensors
        return reordered(dout, inverse, order), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: None) -> Tensor:
        return tangent.index_select(2, ctx.saved_tensors[0])


def cubes_of(shapes: Sequence[Shape], texts: Sequence[int], cube: Shape, device: torch.device) -> Cubes:
    """The layout of videos, each behind its text."""
    volume = cube[0] * cube[1] * cube[2]
    rooms = [-(-text // volume) for text in texts]  # blocks
    room = sum(rooms) * volume
    places: list[Tensor] = []
    numbers: list[Tensor] = []
    sizes: list[Tensor] = []
    counts: list[int] = []
    for sample, (shape, text) in enumerate(zip(shapes, texts, strict=True)):
        at = [torch.arange(side, device="cpu") for side in shape]
        cube_at = [a // c for a, c in zip(at, cube, strict=True)]
        grid = [-(-side // c) for side, c in zip(shape, cube, strict=True)]
        number = (cube_at[0][:, None, None] * grid[1] + cube_at[1][:, None]) * grid[2] + cube_at[2]
        within = ((at[0] % cube[0])[:, None, None] * cube[1] + (at[1] % cube[1])[:, None]) * cube[2] + at[2] % cube[2]
        count = grid[0] * grid[1] * grid[2]
        places.append(sum(rooms[:sample]) * volume + torch.arange(text, device="cpu"))
        places.append(room + (sum(counts) + number).flatten() * volume + within.flatten())
        numbers += [torch.zeros(text, dtype=torch.int64, device="cpu"), 1 + sum(counts) + number.flatten()]
        sizes.append(torch.bincount(number.flatten(), minlength=count))
        counts.append(count)
    place, size = torch.cat(places), torch.cat(sizes)
    total = room + len(size) * volume
    padding = None
    if len(place) < total:
        padding = (
            torch.full((1, 1, total), -torch.inf, dtype=torch.float32, device="cpu")
            .index_fill(2, place, 0.0)
            .to(device)
        )
    sources = place.argsort().to(device) if padding is None else None
    per_video = torch.tensor(counts, device="cpu")
    first = torch.tensor(rooms, device="cpu").cumsum(0) - torch.tensor(rooms, device="cpu")
    block = first[:, None] + torch.arange(max(rooms), device="cpu")
    block = block.masked_fill(block - first[:, None] >= torch.tensor(rooms, device="cpu")[:, None], -1)
    blocks = block.repeat_interleave(per_video, 0).to(device=device, dtype=torch.int32)
    bounds = mask = beside = None
    if len(counts) > 1:
        stops = per_video.cumsum(0)
        bounds = torch.stack([stops - per_video, stops]).repeat_interleave(per_video, 1).to(device, torch.int32)
        mask = documents(counts).to(device)
        if room:
            sample_of_text = torch.arange(len(rooms), device="cpu").repeat_interleave(torch.tensor(rooms, device="cpu"))
            sample_of_cube = torch.arange(len(rooms), device="cpu").repeat_interleave(per_video)
            layout = sample_of_text[:, None] == torch.cat([sample_of_text, sample_of_cube])
            beside = BlockMask.from_layout(layout, block=volume, q_len=room, k_len=total).to(device)
    number = torch.cat(numbers).to(device)
    return Cubes(place.to(device), sources, number, size.to(device), bounds, room, blocks, padding, mask, beside)


def shapes_of(shape: Shape | Sequence[Shape], text: int | Sequence[int], tokens: int) -> list[tuple[Shape, int]]:
    """Raises ValueError unless they have this many tokens."""
    several = isinstance(shape, Sequence) and all(isinstance(each, Sequence) for each in shape)
    given: list[object] = list(shape) if several else [shape]
    shapes = [checked_shape(each, "shape") for each in given]
    texts = [integer(each, "text", "tokens") for each in (text if isinstance(text, Sequence) else [text] * len(shapes))]
    if len(texts) != len(shapes) or min(texts, default=0) < 0:
        raise ValueError(f"text must be the tokens of text before each of {len(shapes)} videos; got {text}.")
    found = sum(t * h * w for t, h, w in shapes) + sum(texts)
    if found != tokens or not shapes:
        more = f" and texts of {texts}" if any(texts) else ""
        raise ValueError(f"shape must have as many tokens as x, {tokens}; got {shapes}{more}, {found} tokens.")
    return list(zip(shapes, texts, strict=True))


def checked_shape(shape: object, name: str) -> Shape:
    """Frames, rows and columns; raises ValueError unless they are three positive numbers."""
    if not isinstance(shape, Sequence) or len(shape) != 3:
        raise ValueError(f"{name} must be three numbers, frames, rows and columns; got {shape}.")
    check_at_least_one(**{f"{name}[{axis}]": size for axis, size in enumerate(shape)})
    return int(shape[0]), int(shape[1]), int(shape[2])
