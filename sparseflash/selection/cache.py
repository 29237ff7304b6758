"""The cache of a layer that chooses: keys and values, and what its choice is made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from sparseflash.nn.kv_cache import KVCache
from sparseflash.selection.frame import Frame


class SelectionCache(KVCache):
    """A `KVCache` with more tensors by name: keys of an indexer, or compressed keys of blocks.

    >>> cache = SelectionCache(2, 4, 100, 16, 16, {"index_k": (1, 100, 8)})
    >>> cache.more["index_k"].shape
    torch.Size([2, 1, 100, 8])

    `new_cache` of a layer makes one that fits. more: `(heads, rows, features)` of each tensor. `truncate` forgets
    tokens of all of them, because rows past the tokens are not read.
    """

    def __init__(
        self, batch: int, kv_heads: int, capacity: int, head_dim: int, value_dim: int,
        more: Mapping[str, tuple[int, int, int]], *, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self._value_dim = value_dim
        super().__init__(batch, kv_heads, capacity, head_dim, device=device, dtype=dtype)
        with torch.inference_mode(False):
            self.more = {name: self.k.new_zeros(batch, *shape) for name, shape in more.items()}

    def _values(self) -> Tensor:
        return self.k.new_zeros(*self.k.shape[:3], self._value_dim)

    def write(self, name: str, places: Tensor, x: Tensor) -> Tensor:
        """Puts rows `x [B, H, n, F]` at these places, int64 `[n]`, and returns the whole tensor."""
        whole = self.more[name]
        return whole.index_copy_(2, places, x.to(whole.dtype))


def check_cache(cache: object, training: bool) -> None:
    """Raises unless it is a cache, and used for inference."""
    if not isinstance(cache, SelectionCache):
        raise TypeError(f"cache must be a SelectionCache, as layer.new_cache makes it; got {type(cache).__name__}.")
    if training or torch.is_grad_enabled():
        raise ValueError(
            "cache must be used for inference, without gradients: call layer.eval(), and the layer under "
            "torch.inference_mode() or torch.no_grad()."
        )


def ended(tokens: int, span: int, step: int) -> int:
    """The blocks of keys `[step * j, step * j + span)` that are complete among the first `tokens` keys."""
    return max(0, (tokens - span) // step + 1)


def ended_of(tokens: Tensor, span: int, step: int) -> Tensor:
    """`ended` on the device."""
    return (tokens + (step - span)).div(step, rounding_mode="floor").clamp(min=0)


def of_blocks(
    summary: Callable[..., tuple[Tensor, ...]], of: Mapping[str, Tensor], frame: Frame, cache: SelectionCache | None,
    *, span: int, step: int,
) -> list[Tensor]:  # fmt: skip
    """One row for each complete block of each tensor: `[B, H, blocks, F]`, or with room past them if there is a cache.

    summary: takes the keys of blocks `[B, H, n, span, D]` of each tensor, and the first places of these blocks, int64
        `[n]`, and returns their rows `[B, H, n, F]`.
    of: `[B, H, Nk, D]`, of all keys, the cached ones included, by the name of their rows in the cache.
    """
    if cache is not None and frame.place is not None:
        return _with_last_block(summary, of, frame.place, cache, span, step)
    start = 0 if cache is None else ended(frame.start, span, step)
    stop = ended(frame.k_len, span, step)
    firsts = torch.arange(start, stop, device=frame.device) * step
    if stop > start:
        room = slice(start * step, (stop - 1) * step + span)
        blocks = [x[:, :, room].unfold(2, span, step).transpose(3, 4) for x in of.values()]
    else:
        blocks = [x[:, :, :0, None].expand(-1, -1, -1, span, -1) for x in of.values()]
    rows = summary(*blocks, firsts)
    return list(rows) if cache is None else _written(cache, of, firsts // step, rows)


def _with_last_block(
    summary: Callable[..., tuple[Tensor, ...]], of: Mapping[str, Tensor], place: Tensor, cache: SelectionCache,
    span: int, step: int,
) -> list[Tensor]:  # fmt: skip
    """The row of the last complete block is computed at every token, because a CUDA graph has no branches.

    Before the first block is complete it is that of block 0, which is not read.
    """
    kept = [cache.more[name] for name in of]
    if kept[0].shape[2] == 0:
        return kept
    row = (place + (1 - span)).div(step, rounding_mode="floor").clamp(min=0)
    first = row * step
    places = first + torch.arange(span, device=place.device)
    blocks = [x.index_select(2, places).unsqueeze(2) for x in of.values()]
    return _written(cache, of, row, summary(*blocks, first))


def _written(cache: SelectionCache, names: Iterable[str], places: Tensor, rows: Iterable[Tensor]) -> list[Tensor]:
    return [cache.write(name, places, row) for name, row in zip(names, rows, strict=True)]
