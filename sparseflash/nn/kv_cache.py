"""The keys and values of a layer, kept while tokens are generated."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash.blockmask.arguments import check_at_least_one, checked_device, dense_tensor, integer
from sparseflash.blockmask.streams import is_capturing
from sparseflash.validation import check_dtype


class KVCache:
    """Keys and values of the tokens so far, with room for `capacity` of them; all sequences have equally many.

    >>> cache = KVCache(2, 4, 100, 16)
    >>> cache.append(torch.randn(2, 4, 7, 16), torch.randn(2, 4, 7, 16))
    >>> cache.length, cache.lengths.tolist()
    (7, [7, 7])

    `SparseSelfAttention.new_cache` makes a cache that fits the layer. `k` and `v` are `[B, Hkv, capacity, D]`; tokens
    past `length` are not read. `lengths`, int32 `[B]` on the device, is the same number: new tokens read their place
    there, so `GraphedStep` can replay a step. Do not write to it; set `length`, or call `truncate`.
    """

    def __init__(
        self, batch: int, kv_heads: int, capacity: int, head_dim: int, *, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        check_at_least_one(batch=batch, kv_heads=kv_heads, capacity=capacity, head_dim=head_dim)
        device = None if device is None else checked_device(device)
        if dtype is not None:
            check_dtype(dtype)
        with torch.inference_mode(False):  # otherwise it could not be written to outside of inference mode
            self.k = torch.zeros(batch, kv_heads, capacity, head_dim, device=device, dtype=dtype)
            self.v = self._values()
            self.lengths = torch.zeros(batch, dtype=torch.int32, device=self.k.device)
        self._length = 0

    @property
    def length(self) -> int:
        """The tokens so far."""
        return self._length

    @length.setter
    def length(self, length: int) -> None:
        self._length = length
        self.lengths.fill_(length)

    def _values(self) -> Tensor:
        return torch.zeros_like(self.k)

    @property
    def capacity(self) -> int:
        return self.k.shape[2]

    def append(self, k: Tensor, v: Tensor, places: Tensor | None = None) -> None:
        """Adds the keys and values of new tokens, `[B, Hkv, N, D]`, of the cache's dtype and on its device.

        places: of the tokens, int64 `[N]`, if the caller has them already; by default those after the last token.
        """
        for name, x in (("k", k), ("v", v)):
            if dense_tensor(x, name).dtype != self.k.dtype:
                raise TypeError(f"{name} must have the cache's dtype {self.k.dtype}; got {x.dtype}. Cast it first.")
            check_device(self, x, name)
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError(
                "k and v must not require gradients: a cache is for inference, and would keep all that they were "
                "computed from. Add them under torch.no_grad()."
            )
        batch, kv_heads, _, head_dim = self.k.shape
        wanted = [(batch, kv_heads, k.shape[2] if k.ndim == 4 else 0, x.shape[3]) for x in (self.k, self.v)]
        if [tuple(k.shape), tuple(v.shape)] != wanted:
            shapes = dict.fromkeys(f"[{batch}, {kv_heads}, N, {dim}]" for dim in (head_dim, self.v.shape[3]))
            raise ValueError(
                f"k and v must have shape {' and '.join(shapes)} to be added to this cache; got {list(k.shape)} and "
                f"{list(v.shape)}."
            )
        check_room(self, k.shape[2])
        places = next_places(self, k.shape[2]) if places is None else places
        self.k.index_copy_(2, places, k)
        self.v.index_copy_(2, places, v)
        self.lengths.add_(k.shape[2])
        count(self, k.shape[2])

    def truncate(self, length: int) -> None:
        """Forgets the tokens after the first `length`, such as drafts that were not accepted.

        Also call it after a step in which a later layer failed; a layer that fails itself restores its own cache.

        >>> cache = KVCache(1, 4, 100, 16)
        >>> cache.append(torch.randn(1, 4, 7, 16), torch.randn(1, 4, 7, 16))
        >>> cache.truncate(5)
        >>> cache.length
        5

        Raises ValueError if `length` exceeds the number of tokens in the cache.
        """
        length = integer(length, "length", "tokens")
        if not 0 <= length <= self.length:
            raise ValueError(f"length must be from 0 to the cache's {self.length} tokens; got {length}.")
        self.length = length

    def clear(self) -> None:
        """Forgets all tokens."""
        self.truncate(0)


def next_places(cache: KVCache, tokens: int) -> Tensor:
    """The places of the next tokens, int64 `[tokens]`: read on the device, where a CUDA graph finds them anew."""
    return torch.arange(tokens, device=cache.lengths.device) + cache.lengths[:1]


def count(cache: KVCache, tokens: int) -> None:
    """Counts tokens on the host that have been added on the device."""
    cache._length += tokens


def length_on_host(cache: KVCache) -> int:
    """The tokens so far, for a call that a CUDA graph cannot replay, because its launches depend on their number."""
    if is_capturing(cache.lengths.device):
        raise ValueError(
            "a CUDA graph can record a call with a cache only for few new tokens, one for the layers of selection, and "
            "with a backend that decodes, as by default. Add the prompt before, without a graph."
        )
    return cache.length


def check_device(cache: KVCache, x: Tensor, name: str = "x") -> None:
    """Raises ValueError unless x is on the cache's device."""
    if x.device != cache.k.device:
        raise ValueError(f"{name} must be on the cache's device {cache.k.device}; it is on {x.device}.")


def check_room(cache: KVCache, tokens: int) -> None:
    """Raises ValueError unless the cache has room for so many more tokens."""
    if (stop := cache.length + tokens) > cache.capacity:
        raise ValueError(
            f"capacity must be at least {stop} tokens for {tokens} more; the cache has room for {cache.capacity}."
        )
