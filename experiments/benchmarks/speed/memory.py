"""Peak GPU memory of one forward and backward."""

from __future__ import annotations

import torch

from experiments.benchmarks.harness import Unavailable
from experiments.benchmarks.speed.peers.runner import Inputs, Runner

MIB = 2**20


def allocated(device: torch.device) -> int:
    """Bytes that tensors hold at present."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_mib(runner: Runner, inputs: Inputs, before: int, device: torch.device) -> float:
    """The peak of a second step in MiB: q, k, v and the output's gradient, the mask and everything that the
    implementation keeps with it, the output, the gradients and what they are computed from.

    `before`: bytes allocated when the runner was not yet built, `inputs` included. The first step compiles, and may
    build what later ones reuse. Raises Unavailable on a CPU, whose memory PyTorch does not count.
    """
    if device.type != "cuda":
        raise Unavailable("PyTorch counts memory on a CUDA device only")
    with runner.context():
        runner.step()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        runner.step()
        torch.cuda.synchronize(device)
    # A peer with its own order of dimensions has copies of the inputs, which then count as the inputs, once.
    given = {tensor.data_ptr(): tensor.nbytes for tensor in inputs.tensors}
    shared = sum(given.get(tensor.data_ptr(), 0) for tensor in runner.inputs.tensors)
    return (torch.cuda.max_memory_allocated(device) - before + shared) / MIB


def floor_mib(batch: int, heads: int, kv_heads: int, length: int, head_dim: int, dtype: str) -> float:
    """MiB of q, k, v, the output and the gradients of all four, the least that training can take."""
    size = 4 if dtype in ("float32", "tf32") else 2
    return 4.0 * batch * (heads + kv_heads) * length * head_dim * size / MIB
