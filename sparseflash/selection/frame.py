"""Where the queries of a call are among its keys: packed documents, and tokens that follow a cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseflash.blockmask.running_sums import running_sums
from sparseflash.nn.kv_cache import KVCache, next_places
from sparseflash.nn.rotary import Rotation
from sparseflash.selection.context import Context


class Packing(NamedTuple):
    """Documents with room between them, so that each begins at a multiple of a number of tokens.

    >>> packing = packing_of([0, 3, 5], 4, 5, torch.device("cpu"))
    >>> packing.places.tolist(), packing.firsts.tolist()
    ([0, 1, 2, 4, 5], [0, 0, 0, 0, 4, 4, 4, 4])

    places: the place of each token, int64 `[N]`. firsts: where the document of each place begins, int64 `[room]`.
    stops: where the room of each document ends. bounds: where the document of each place begins, and where its room
    ends, int32 `[2, room]`.
    """

    places: Tensor
    firsts: Tensor
    stops: tuple[int, ...]
    bounds: Tensor

    def spread(self, x: Tensor) -> Tensor:
        """`[1, N, F]` to `[1, room, F]`, zeros between the documents."""
        return x.new_zeros(1, len(self.firsts), x.shape[2]).index_copy(1, self.places, x)

    def collect(self, x: Tensor) -> Tensor:
        """`[1, room, F]` back to `[1, N, F]`."""
        return x.index_select(1, self.places)


@torch.compiler.disable(reason="lengths are read on the host")  # type: ignore[untyped-decorator]
def packing_of(cu_seqlens: Any, block: int, tokens: int, device: torch.device) -> Packing:
    """The packing of documents, whose running sums are `cu_seqlens`, at multiples of `block`."""
    sums = running_sums(cu_seqlens, "cu_seqlens")
    if sums[-1] != tokens:
        raise ValueError(f"cu_seqlens must end with the number of tokens of x, {tokens}; got {sums[-1]}.")
    ends = torch.tensor(sums, device="cpu")
    lengths = ends.diff()
    rooms = (lengths + block - 1) // block * block
    stops = rooms.cumsum(0)
    firsts = stops - rooms
    begins = firsts - ends[:-1]
    places = torch.arange(tokens, device="cpu") + begins.repeat_interleave(lengths)
    bounds = torch.stack([firsts, stops]).repeat_interleave(rooms, 1).to(device)
    return Packing(places.to(device), bounds[0], tuple(stops.tolist()), bounds.to(torch.int32))


class Frame(NamedTuple):
    """Query i is at place `start + i` of the `start + q_len` keys.

    packing: of packed documents, which have no cache. context: of a sequence on several ranks; the keys are also those
    of the ranks before. bounds: where the document of each query begins and its room ends, int32 `[2, Nq]`; None
    without documents. rotation: of the queries' tokens; None without rotary positions.

    If one token follows a cache, of which a CUDA graph may replay the step, see `after`: lengths, int32 `[B]`, are the
    keys of each sequence, and place, int64 `[1]`, is the token's.
    """

    start: int
    q_len: int
    device: torch.device
    packing: Packing | None = None
    context: Context | None = None
    bounds: Tensor | None = None
    rotation: Rotation | None = None
    lengths: Tensor | None = None
    place: Tensor | None = None

    @classmethod
    def after(cls, cache: KVCache) -> Frame:
        """One token after those in the cache: keys are the whole cache, with room past the token.

        Its place is read on the device, and nothing on the host. All sequences are equally long. The bounds are of a
        document that ends with the token. Several layers can share the frame if their caches are equally long and have
        the same capacity.
        """
        lengths = cache.lengths + 1
        bounds = torch.nn.functional.pad(lengths[:1], (1, 0)).unsqueeze(1)
        return cls(
            cache.capacity - 1, 1, lengths.device, bounds=bounds, lengths=lengths, place=next_places(cache, 1)
        )  # fmt: skip

    @property
    def k_len(self) -> int:
        return self.start + self.q_len

    @property
    def rows(self) -> Tensor:
        return torch.arange(self.q_len, device=self.device) if self.packing is None else self.packing.places

    def joined(self, x: Tensor) -> Tensor:
        """The rows `[B, H, n, D]` of the queries' tokens behind the rows of the ranks before."""
        return x if self.context is None else self.context.joined(x)

    @property
    def share(self) -> float:
        return 1.0 if self.context is None else self.context.count / self.context.tokens

    @property
    def new_places(self) -> Tensor:
        """The places of the queries, int64 `[Nq]`."""
        return torch.arange(self.start, self.k_len, device=self.device) if self.place is None else self.place

    def places(self, rows: Tensor | slice) -> Tensor:
        """The places of these queries, int64 `[rows, 1]`."""
        return self.new_places[rows].unsqueeze(1)

    def firsts(self, rows: Tensor | slice) -> Tensor:
        """The first place of the document of each of these queries, int64 `[rows, 1]`."""
        if self.packing is None:
            return torch.zeros_like(self.places(rows))
        return self.packing.firsts[rows].unsqueeze(1)

    def positions(self, places: Tensor) -> Tensor:
        return places if self.packing is None else places - self.packing.firsts[places]

    def visible(self, rows: Tensor | slice) -> Tensor:
        """Which keys these queries may see: bool `[rows, Nk]`."""
        key = torch.arange(self.k_len, device=self.device)
        return (key >= self.firsts(rows)) & (key <= self.places(rows))
