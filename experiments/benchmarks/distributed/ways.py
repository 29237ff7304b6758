from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional as F

from sparseflash import BlockMask, attention, distributed, masks, testing

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
# Its name from PyTorch 2.13 on, which warns of the older one.
all_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
ONE, PEER = "one-gpu", "context-parallel"
COLLECTIVE = "-collective"
_KEYS = tuple(f"keys-{stages}-stages" for stages in range(3))
WAYS = (ONE, "auto", *_KEYS, *(f"{way}{COLLECTIVE}" for way in _KEYS[:2]), "queries", "all-to-all", "all-gather", PEER)


def documents(tokens: int) -> BlockMask:
    """64 a million tokens, with a log-normal distribution."""
    shares = np.random.default_rng(0).lognormal(sigma=1.0, size=max(4, tokens >> 14))
    lengths = np.maximum(1, (shares / shares.sum() * tokens).astype(np.int64))
    lengths[-1] += tokens - lengths.sum()
    return masks.documents(lengths, causal=True)


PATTERNS: dict[str, Callable[[int], BlockMask]] = {
    "butterfly": masks.butterfly,
    "window-4096": partial(masks.local, window=4096, causal=True),
    "window-4096-and-64-sinks": partial(masks.streaming, window=4096, sink=64),
    "documents": documents,
    "bigbird": masks.deepspeed_bigbird,
    "causal": masks.causal,
    "dense": BlockMask.dense,
}


class Way(NamedTuple):
    tensors: Sequence[Tensor]
    dout: Tensor
    attention: Attention
    whole: Callable[[Tensor], Tensor]


@dataclass
class Setting:
    name: str
    mask: BlockMask
    tensors: list[Tensor]
    dout: Tensor
    plan: distributed.ShardPlan

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    def planned(self, **options: object) -> Way:
        plan = distributed.shard(self.mask, like=self.plan, **options) if options else self.plan  # type: ignore[arg-type]
        return self.local(lambda q, k, v: distributed.attention(q, k, v, plan))

    def local(self, function: Attention) -> Way:
        *tensors, dout = (self.plan.scatter(x) for x in (*self.tensors, self.dout))
        return Way(tensors, dout, function, self.plan.gather)


def gathering(setting: Setting) -> Way:
    """Ranks must hold equally many."""
    plan = setting.plan
    if len(set(plan.keys.counts)) > 1:
        raise ValueError(f"ranks must hold equally many keys; got {plan.keys.counts}")
    start = sum(plan.queries.counts[: plan.rank])
    mask = plan.mask if plan.queries.is_contiguous else plan.mask.permute(plan.queries.order)
    mask = mask.crop(q=(start, start + plan.queries.counts[plan.rank])).to(setting.device)

    def whole(x: Tensor) -> Tensor:
        return collectives.wait_tensor(all_gather(x.contiguous(), 2, plan.process_group))

    return setting.local(lambda q, k, v: attention(q, whole(k), whole(v), mask))


def by_pytorch(setting: Setting, stack: ExitStack) -> Way:
    """PyTorch's own ring; its context stays open as long as the stack."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import _cp_options, context_parallel_unshard

    if setting.name not in ("causal", "dense") or setting.device.type != "cuda":
        raise ValueError("dense and causal attention on GPUs only")
    if setting.tensors[0].shape[1] != setting.tensors[1].shape[1]:
        raise ValueError("has no grouped heads")
    q, k, v, dout = (x.clone() for x in (*setting.tensors, setting.dout))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    causal = setting.name == "causal"
    _cp_options.enable_load_balance = causal  # which it refuses to do otherwise
    stack.enter_context(context_parallel(mesh, buffers=[q, k, v, dout], buffer_seq_dims=[2, 2, 2, 2]))

    def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return Way([q, k, v], dout, ring, lambda x: context_parallel_unshard(mesh, [x], [2])[0])


def way_of(name: str, setting: Setting, stack: ExitStack) -> Way:
    if name == ONE:
        mask = setting.mask.to(setting.device)
        return Way(setting.tensors, setting.dout, lambda q, k, v: attention(q, k, v, mask), lambda x: x)
    if name == PEER:
        return by_pytorch(setting, stack)
    if name == "all-gather":
        return gathering(setting)
    if name == "auto":
        return setting.planned()
    strategy, *stages = name.removesuffix(COLLECTIVE).split("-")
    options: dict[str, object] = {"strategy": "heads" if name == "all-to-all" else strategy}
    if strategy == "keys":
        options["stages"] = int(stages[0])
    if name.endswith(COLLECTIVE):
        options["transport"] = "collective"
    return setting.planned(**options)


def leaves(way: Way) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in way.tensors]


class Compared:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.one: dict[str, Tensor] = {}
        self.allowed: dict[str, float] = {}

    def __call__(self, way: Way) -> float | None:
        found = self.results(way)
        if way.tensors is self.setting.tensors:
            mask = self.setting.mask.to(self.setting.device)
            compared = testing.compare(way.attention, *way.tensors, mask, dout=way.dout, heads=1, blocks=2)
            self.allowed = {name: error.allowed for name, error in compared.errors.items()}
            self.one = found
            return compared.worst
        errors = [
            float((found[name].float() - x.float()).abs().max()) / self.allowed[name] for name, x in self.one.items()
        ]
        return max(errors, default=None)

    def results(self, way: Way) -> dict[str, Tensor]:
        given = leaves(way)
        out = way.attention(*given)
        found = (out.detach(), *torch.autograd.grad(out, given, way.dout))
        return {name: way.whole(x) for name, x in zip(("out", "dq", "dk", "dv"), found)}
