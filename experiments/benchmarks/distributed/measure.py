"""Times of attention over the ranks that torchrun started, beside one rank, all-gather and PyTorch's own.

    torchrun --nproc-per-node 2 -m experiments.benchmarks.distributed measure

Each way is timed as a forward and a backward pass, from a barrier to the end on the slowest rank, and the ways take
turns. Rank 0 writes the table.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_single_autograd, wait_tensor
from torch.nn.functional import scaled_dot_product_attention

from experiments.benchmarks.distributed.simulate import PATTERNS
from sparseflash import BlockMask, attention, distributed

Pass = Callable[[], None]
ROUNDS, CALLS = 7, 5


def passes(q: Tensor, k: Tensor, v: Tensor, call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Pass:
    """A forward and a backward pass of these leaves."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    dout = torch.randn_like(call(q, k, v))
    return lambda: torch.autograd.backward(call(q, k, v), dout, inputs=(q, k, v))


def gathering(plan: distributed.ShardPlan, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention after an all-gather of all keys. Ranks must hold equally many."""
    start = sum(plan.queries.counts[: plan.rank])
    mask = plan.mask.permute(plan.queries.order) if plan.ranks > 1 else plan.mask
    mask = mask.crop(q=(start, start + plan.queries.counts[plan.rank])).to(device)

    def whole(x: Tensor) -> Tensor:
        return wait_tensor(all_gather_single_autograd(x.contiguous(), 2, plan.process_group))

    return lambda q, k, v: attention(q, whole(k), whole(v), mask)


def ways(name: str, mask: BlockMask, tensors: list[Tensor], stack: ExitStack) -> dict[str, Pass]:
    """The passes by name; `tensors` are whole."""
    device, ranks = tensors[0].device, dist.get_world_size()
    on_device = mask.to(device)
    found = {"one rank": passes(*tensors, lambda q, k, v: attention(q, k, v, on_device))}
    plan = distributed.shard(mask)
    local = [plan.scatter(x) for x in tensors]
    found["auto"] = passes(*local, lambda q, k, v: distributed.attention(q, k, v, plan))

    def forced(planned: distributed.ShardPlan) -> Pass:
        return passes(*local, lambda q, k, v: distributed.attention(q, k, v, planned))

    for stages in range(1, 5):
        found[f"keys, {stages} st."] = forced(distributed.shard(mask, like=plan, strategy="keys", stages=stages))
    found["queries"] = forced(distributed.shard(mask, like=plan, strategy="queries"))
    if tensors[1].shape[1] % ranks == 0:
        found["heads"] = forced(distributed.shard(mask, like=plan, strategy="heads"))
    if len(set(plan.keys.counts)) == 1:
        found["all-gather"] = passes(*local, gathering(plan, device))
    if name == "causal" and device.type == "cuda":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel

        group = tensors[0].shape[1] // tensors[1].shape[1]
        q, k, v = tensors[0].clone(), *(x.repeat_interleave(group, 1) for x in tensors[1:])  # it has no grouped heads
        stack.enter_context(
            context_parallel(init_device_mesh("cuda", (ranks,)), buffers=[q, k, v], buffer_seq_dims=[2, 2, 2])
        )
        found["PyTorch's context_parallel"] = passes(
            q, k, v, lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True)
        )
    return found


def milliseconds(call: Pass, device: torch.device) -> float:
    """Of one call, on the slowest rank."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    taken = torch.tensor(1e3 * (time.perf_counter() - started) / CALLS, device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def measure(patterns: list[str], tokens: int, heads: int, kv_heads: int, dim: int, device_type: str, out: Path) -> None:
    """Times all ways for these patterns, in a process of each rank."""
    device = torch.device(device_type, int(os.environ["LOCAL_RANK"]) if device_type == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = []
    for name in patterns:
        mask = PATTERNS[name][0](tokens)
        torch.manual_seed(0)  # the same tensors on every rank
        tensors = [torch.randn(1, n, tokens, dim, device=device, dtype=dtype) for n in (heads, kv_heads, kv_heads)]
        with ExitStack() as stack:
            calls = ways(name, mask, tensors, stack)
            samples: dict[str, list[float]] = {way: [] for way in calls}
            for call in calls.values():
                call()
            for _ in range(ROUNDS):
                for way, call in calls.items():
                    samples[way].append(milliseconds(call, device))
        for way, times in samples.items():
            found.append({"pattern": name, "way": way, "ms": statistics.median(times), "samples": times})
            if dist.get_rank() == 0:
                print(f"{name}: {way}: {found[-1]['ms']:.2f} ms", flush=True)
    if dist.get_rank() == 0:
        described = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        settings = {
            "device": described, "torch": torch.__version__, "ranks": dist.get_world_size(), "tokens": tokens,
            "heads": heads, "kv_heads": kv_heads, "dim": dim, "dtype": str(dtype),
        }  # fmt: skip
        out.mkdir(parents=True, exist_ok=True)
        (out / "measured.json").write_text(json.dumps({"settings": settings, "times": found}, indent=1))
    dist.destroy_process_group()
