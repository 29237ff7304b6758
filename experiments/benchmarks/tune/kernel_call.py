"""One of the three kernels as a call of its own, with what it reads of the others' results made before."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from sparseflash import BlockMask
from sparseflash.backends.triton import launch
from sparseflash.backends.triton.configs import Kernel
from sparseflash.backends.triton.schedule.plan import plan_of


class KernelCall(NamedTuple):
    """A launch of a kernel, and the tensors that it writes."""

    run: Callable[[], None]
    results: list[Tensor]  # out; dq; or dk and dv


def fresh_problem(mask: BlockMask, q: Tensor, *, tf32: bool) -> launch.Problem:
    """The attention of `q` [1, H, N, D] to as many heads under a mask, with no launch prepared.

    Those that are kept with the mask's own plan may be of another configuration.
    """
    arrays = mask.indptr, mask.indices, mask.tile, mask.words, mask.pattern
    heads, block = q.shape[1], (mask.block_q, mask.block_k)
    plan = copy(plan_of(*arrays, (1, heads), heads, (mask.q_len, mask.k_len), block))
    plan.launches = {}
    return launch.Problem(plan, None, block, q.shape[-1] ** -0.5, tf32)


def kernel_call(
    kernel: Kernel, problem: launch.Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor,
    preparing: AbstractContextManager[object],
) -> KernelCall:  # fmt: skip
    """The kernel on tensors [1, H, N, D]; no launch is prepared in the problem's plan when it returns.

    preparing: held around the kernels whose results a kernel of the backward needs. In fp32 that kernel reads zeros as
    `delta`: it takes as long, but its results are no gradients.
    """
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    kept = q.new_empty((2, *q.shape[:-1]) if q.dtype == torch.float32 else (0,))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    q, k, v, dout = launch.operands(problem, q, k, v, dout)
    if kernel == "forward":
        return KernelCall(lambda: launch.forward(problem, q, k, v, out, lse, kept), [out])
    if kept.numel():
        lse2, inverse, delta = kept[0], kept[1], torch.zeros_like(lse)
    else:
        lse2, inverse, delta = launch.empty_rows(lse), None, launch.empty_rows(lse)

    def query_gradients() -> None:
        launch.query_gradients(problem, q, k, v, out, lse, dout, None, lse2, inverse, delta, dq)

    def key_gradients() -> None:
        launch.key_gradients(problem, q, k, v, dout, lse2, inverse, delta, None, dk, dv)

    with preparing:
        launch.forward(problem, q, k, v, out, lse, kept)
        if kernel == "dk_dv":
            query_gradients()
    problem.plan.launches.clear()
    return KernelCall(query_gradients, [dq]) if kernel == "dq" else KernelCall(key_gradients, [dk, dv])
