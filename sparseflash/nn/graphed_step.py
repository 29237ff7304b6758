"""`GraphedStep`: a step of generation as a CUDA graph, so that a token does not wait for the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sparseflash.nn.kv_cache import KVCache, check_room, count

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
        ValueError: a cache has no room for the step, or inputs have other shapes.
        RuntimeError: `step` does what a CUDA graph cannot record.

    Under autocast, weights are cast at every call, as long as the graph lives.
    """

    def __init__(self, step: Callable[..., Any], caches: KVCache | Sequence[KVCache]) -> None:
        self.step = step
        self.caches = (caches,) if isinstance(caches, KVCache) else tuple(caches)
        devices = {cache.lengths.device for cache in self.caches if isinstance(cache, KVCache)}
        if not self.caches or not all(isinstance(cache, KVCache) for cache in self.caches):
            raise TypeError(f"caches must be the caches of the layers that step calls; got {caches!r}.")
        if len(set(map(id, self.caches))) < len(self.caches):
            raise ValueError("caches must be given once each; got one of them twice.")
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
            self._restore(lengths)
            raise

    def _restore(self, lengths: Sequence[int]) -> None:
        """Also where the host has counted other tokens than the device, because a call was interrupted."""
        for cache, length in zip(self.caches, lengths, strict=True):
            cache.length = length

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
            self._inputs = tuple(torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x) for x in inputs)
        graph, casts_are_kept = torch.cuda.CUDAGraph(), torch.is_autocast_cache_enabled()
        # A graph that found its weights cast would read casts that are freed when autocast ends.
        torch.set_autocast_cache_enabled(False)
        try:
            with torch.cuda.device(self.device):
                current, side = torch.cuda.current_stream(), torch.cuda.Stream()
                side.wait_stream(current)
                try:
                    with torch.cuda.stream(side):
                        for _ in range(_WARM):
                            self.step(*self._inputs)
                            self._restore(lengths)
                    with torch.cuda.graph(graph, stream=side):
                        self._outputs = self.step(*self._inputs)
                finally:
                    torch.cuda.set_stream(current)  # a failed capture may have left another
                    current.wait_stream(side)  # also if a call failed, whose work then comes before the restoring
        finally:
            torch.set_autocast_cache_enabled(casts_are_kept)
        self._added = [cache.length - length for cache, length in zip(self.caches, lengths, strict=True)]
        self._restore(lengths)  # the capture has counted tokens on the host, and nothing on the device
        self._graph = graph

    def _replayed(self, inputs: tuple[Tensor, ...]) -> Any:
        assert self._graph is not None
        for cache, added in zip(self.caches, self._added, strict=True):
            check_room(cache, added)
        for static, x in zip(self._inputs, inputs, strict=True):
            static.copy_(x)
        self._graph.replay()
        for cache, added in zip(self.caches, self._added, strict=True):
            count(cache, added)
        return tree_map_only(Tensor, torch.clone, self._outputs)
