"""`GraphedStep`: a step of generation as a CUDA graph, so that a token does not wait for the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sparseflash.nn.kv_cache import KVCache, check_room

_WARM = 3  # calls before the capture, in which kernels are compiled and choices are kept


class GraphedStep:
    """A step of generation, recorded in a CUDA graph at its first call and replayed from then on.

    >>> from sparseflash import masks, nn
    >>> layer = nn.SparseSelfAttention(64, 4, masks.causal).eval()
    >>> cache, prompt = layer.new_cache(2, 128), torch.randn(2, 100, 64)
    >>> step = GraphedStep(lambda x: layer(x, cache=cache), cache)
    >>> with torch.inference_mode():
    ...     token = layer(prompt, cache=cache)[:, -1:]
    ...     for _ in range(20):
    ...         token = step(token)
    >>> cache.length
    120

    Args:
        step: takes tensors on the caches' device and returns tensors, in any nest of tuples, lists and dicts. It adds
            tokens to all of the caches: one, or with `SparseSelfAttention` up to 16. It must not wait for the GPU.
        caches: of all layers that `step` calls, on one device.

    Call it with what `step` takes, each time with the same shapes and dtypes. Results have the bits of `step`'s for
    contiguous inputs, and memory of their own. Between calls, caches may be truncated, cleared and added to; weights
    may be changed in place. On other devices than CUDA it calls `step`. There are no gradients.

    A call that fails leaves all of the caches as they were. The first one runs `step` four times more.

    Raises:
        ValueError: a cache has no room for the step, before anything is written; or inputs have other shapes.
        RuntimeError: `step` does what a CUDA graph cannot record.
    """

    def __init__(self, step: Callable[..., Any], caches: KVCache | Sequence[KVCache]) -> None:
        self.step = step
        self.caches = (caches,) if isinstance(caches, KVCache) else tuple(caches)
        devices = {cache.lengths.device for cache in self.caches if isinstance(cache, KVCache)}
        if not self.caches or not all(isinstance(cache, KVCache) for cache in self.caches):
            raise TypeError(f"caches must be the caches of the layers that step calls; got {caches!r}.")
        if len(devices) > 1:
            raise ValueError(f"caches must be on one device; got {', '.join(sorted(map(str, devices)))}.")
        (self.device,) = devices
        self.records = self.device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> Any:
        lengths = [cache.length for cache in self.caches]
        try:
            if not self.records:
                return self.step(*inputs)
            self._check(inputs)
            if self._graph is None:
                self._record(inputs)
            return self._replayed(inputs)
        except BaseException:
            self._truncate(lengths)
            raise

    def _truncate(self, lengths: Sequence[int]) -> None:
        for cache, length in zip(self.caches, lengths, strict=True):
            if cache.length != length:
                cache.truncate(length)

    def _check(self, inputs: tuple[Tensor, ...]) -> None:
        for x in inputs:
            if not isinstance(x, Tensor) or x.device != self.device:
                got = f"a tensor on {x.device}" if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(f"inputs must be tensors on the caches' device {self.device}; got {got}.")
        if self._graph is None:
            return
        given, wanted = ([(list(x.shape), x.dtype) for x in all_] for all_ in (inputs, self._inputs))
        if given != wanted:
            raise ValueError(f"inputs must have the shapes and dtypes of the first call, {wanted}; got {given}.")

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        lengths = [cache.length for cache in self.caches]
        with torch.inference_mode(False):  # otherwise they could not be written to outside of inference mode
            self._inputs = tuple(torch.empty_like(x).copy_(x) for x in inputs)
        current, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM):
                self.step(*self._inputs)
                self._truncate(lengths)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self.device), torch.cuda.graph(graph, stream=side):
                self._outputs = self.step(*self._inputs)
        finally:
            torch.cuda.set_stream(current)  # a failed capture may have left another
        self._added = [cache.length - length for cache, length in zip(self.caches, lengths, strict=True)]
        self._truncate(lengths)  # the capture has counted tokens on the host, and nothing on the device
        self._graph = graph

    def _replayed(self, inputs: tuple[Tensor, ...]) -> Any:
        assert self._graph is not None
        for cache, added in zip(self.caches, self._added, strict=True):
            check_room(cache, added)
        for static, x in zip(self._inputs, inputs, strict=True):
            static.copy_(x)
        self._graph.replay()
        for cache, added in zip(self.caches, self._added, strict=True):
            cache.length += added
        return tree_map_only(Tensor, torch.clone, self._outputs)
