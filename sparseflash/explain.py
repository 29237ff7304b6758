"""`explain()`: the kernels that `attention` would run for given tensors and a mask, and the reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sparseflash.attention import KERNELS, Backend, chosen_backend, in_one_dtype
from sparseflash.backends.problem import Problem
from sparseflash.blockmask import BlockMask
from sparseflash.dropout import Dropout, threshold
from sparseflash.scores.change import Change, Scores
from sparseflash.validation import check_mask, check_tensors, checked_scale, prepared_scores

if TYPE_CHECKING:
    from sparseflash.backends.triton.family import KernelChoice


class Chosen(NamedTuple):
    """The kernels of one pass, and why each faster family was refused. family: None if the requested kernels cannot
    run.
    """

    family: str | None
    refusals: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Explanation:
    """What runs, and why: `print` it, or read its fields.

    >>> print(Explanation("blockwise", "the default for tensors on cpu"))
    backend blockwise: the default for tensors on cpu

    `capability` is the compute capability of the GPU that the kernels were chosen for. `versions` is a note on the
    Hopper kernels if they were not measured with the installed Triton; otherwise None. `launcher` says what starts the
    kernels on this machine: compiled C, or Triton's slower launcher, and why.
    """

    backend: str
    why: str
    capability: tuple[int, int] | None = None
    forward: Chosen | None = None
    backward: Chosen | None = None
    kernels: tuple[KernelChoice, ...] = ()
    versions: str | None = None
    launcher: str | None = None

    def __str__(self) -> str:
        lines = [f"backend {self.backend}: {self.why}"]
        if self.capability is not None:
            lines.append(f"compute capability {self.capability[0]}.{self.capability[1]}")
        if self.versions is not None:
            lines.append(self.versions)
        if self.launcher is not None and self.launcher != "compiled C":
            lines.append(f"kernels are started by {self.launcher}")
        for name, chosen in (("forward", self.forward), ("backward", self.backward)):
            if chosen is not None:
                lines.append(f"{name}: {chosen.family or 'no'} kernels")
                lines += [f"  not {family}: {reason}" for family, reason in chosen.refusals]
        for each in self.kernels:
            shares = f", {each.chunks:,} of them chunks of lists that were cut" if each.chunks else ""
            lines += [
                f"  {each.kernel}: {each.block_m} x {each.block_n} (queries x keys) a step, {each.num_warps} warps, "
                f"{each.num_stages} stages, {each.arithmetic} arithmetic",
                f"    {each.programs:,} programs{shares}; {each.tiles:,} tiles, {each.longest:,} in the longest",
                f"    walks {each.walks}",
                f"    loads by {each.loads}",
            ]
        return "\n".join(lines)


def explain(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None = None, *, dropout_p: float = 0.0,
    scores: Scores | Change | None = None, backend: Backend | None = None, capability: tuple[int, int] | None = None,
) -> Explanation:  # fmt: skip
    """Which kernels `attention(q, k, v, mask)` runs forward and backward, in which tiles, and why.

    >>> from sparseflash import explain, masks
    >>> q = k = v = torch.empty(1, 8, 4096, 64, dtype=torch.bfloat16)
    >>> print(explain(q, k, v, masks.local(4096, window=512), capability=(9, 0)))  # doctest: +ELLIPSIS
    backend triton: asked for by its compute capability
    compute capability 9.0
    forward: portable kernels
      not hopper: ...
    backward: portable kernels
      not hopper: ...
      forward: 64 x ... (queries x keys) a step, ... warps, ... stages, half arithmetic
        ... programs; ... tiles, 5 in the longest
        walks tiles of 128 x 128: ...
        loads by descriptors: TMA needs no registers for addresses
      dq: ...

    The portable kernels run every score modification, the Hopper kernels only some:

    >>> from sparseflash import scores
    >>> found = explain(q, k, v, scores=scores.bias(torch.zeros(1, 1, 4096, 1)), capability=(9, 0))
    >>> found.forward.family, found.forward.refusals
    ('portable', (('hopper', "they need bias in q's dtype; got torch.float32"),))

    Args:
        q, k, v, mask, dropout_p, scores, backend: as for `attention`. Nothing is computed, so the tensors may be
            uninitialised. With `capability`, all tensors may be on any device, including "meta", but the mask must not
            be on "meta". The backward is explained for the tensors in `scores` that require gradients. If the Hopper
            kernels were not measured with the installed Triton, they are checked, provided that q is on a GPU.
        capability: a GPU's compute capability, such as (9, 0) for an H100; by default the capability of q's GPU.

    Returns:
        An `Explanation`, with a `KernelChoice` for each kernel.

    Raises:
        TypeError, ValueError, RuntimeError: if `attention` would. Under `torch.no_grad` no backward is needed, and the
            explanation says so.
    """
    check_tensors(q, k, v)
    dropped = threshold(dropout_p)
    q, k, v = in_one_dtype(q, k, v)
    if mask is not None:
        check_mask(mask, q, k, any_device=capability is not None)
        if capability is not None and mask.device.type == "meta":
            raise ValueError(
                "mask must have contents, because kernels are chosen by them; got a mask on the meta device. With "
                "capability= only q, k and v may be there: pass the mask on the CPU."
            )
    if capability is not None and backend not in tuple(KERNELS):  # a tuple: backend may be no name at all
        raise ValueError(f"backend must be 'triton', 'hopper' or None if capability is given; got {backend!r}.")
    if capability is not None and not (isinstance(capability, tuple) and list(map(type, capability)) == [int, int]):
        raise TypeError(f"capability must be two integers, such as (9, 0) for an H100; got {capability!r}.")
    if capability is None:
        name, why = chosen_backend(backend, q.device)
    else:
        name, why = backend or "triton", "asked for by its compute capability"
    changes = prepared_scores(scores, q, k, mask, any_device=capability is not None)
    if name not in KERNELS:
        return Explanation(name, why)
    from sparseflash.backends.triton import api, native
    from sparseflash.backends.triton import device as gpu

    if capability is None:
        api.check(q, k, v)
        capability = gpu.capability_of(q.device)
    else:
        gpu.check_capability(capability, "the one that explain was asked about")
        api.check_layout(q, k, v)
    dropout = Dropout(torch.empty(1, dtype=torch.int64, device="meta"), dropped) if dropped else None
    scale = checked_scale(None, q.shape[-1])
    problem = Problem.of(mask, scale=scale, batch=q.shape[0], dropout=dropout, kernels=KERNELS[backend])
    if q.numel() == 0 or k.numel() == 0:
        return Explanation(name, f"{why}; there is nothing to compute", capability)
    if changes is not None:
        changes = changes.without("temperature")  # the queries are divided by it before
    changes = changes if changes and changes.changes else None
    decisions, kernels, versions = api.choices(q, k, v, problem, capability, changes)
    forward, backward = (
        Chosen(None if each.family is None else each.family.name, tuple(each.refusals.items())) for each in decisions
    )
    return Explanation(name, why, capability, forward, backward, tuple(kernels), versions, native.served_by())
