"""One's own change of scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflash.scores.change import Change, Learned, Place, Sizes, on_device


@dataclass(frozen=True, eq=False)
class Function(Change):
    """`function(score, b, h, q, k, *tensors)`."""

    kind = "function"
    function: Callable[..., Tensor]
    given: tuple[Tensor, ...]

    def tensors(self) -> tuple[Tensor, ...]:
        return self.given

    def with_tensors(self, tensors: Sequence[Tensor]) -> Function:
        return Function(self.function, tuple(tensors))

    def prepared(self, sizes: Sizes) -> Function:
        for number, x in enumerate(self.given):
            on_device(x, f"tensor {number} of the function", sizes)
        return self

    def changed(self, scores: Tensor, at: Place) -> Tensor:
        changed = self.function(scores, at.batch, at.head, at.query, at.key, *self.given)
        if not isinstance(changed, Tensor) or changed.shape != scores.shape:
            got = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ValueError(
                f"the function must return one score for each that it gets, {list(scores.shape)}; got {got}."
            )
        return changed.to(scores.dtype).contiguous()

    def gradient(self, gradient: Tensor, scores: Tensor, changed: Tensor, at: Place, learned: Learned) -> Tensor:
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            tensors = [x.detach().requires_grad_(zeros is not None) for x, zeros in zip(self.given, learned)]
            result = self.with_tensors(tensors).changed(leaf, at)
        if not result.requires_grad:  # it may ignore the score
            return torch.zeros_like(gradient)
        into = [zeros for zeros in learned if zeros is not None]
        first, *others = torch.autograd.grad(
            result, [leaf, *(x for x in tensors if x.requires_grad)], gradient, allow_unused=True
        )
        for zeros, other in zip(into, others, strict=True):
            if other is not None:
                zeros += other
        return torch.zeros_like(gradient) if first is None else first


def function(change: Callable[..., Tensor], *tensors: Tensor) -> Function:
    """Replaces every score by `change(score, b, h, q, k, *tensors)`.

    >>> import torch
    >>> from sparseflash import attention, scores
    >>> q, k, v = (torch.randn(1, 2, 50, 16) for _ in range(3))
    >>> gain = torch.ones(2, requires_grad=True)
    >>> own = scores.function(lambda score, b, h, q, k, gain: score * gain[h], gain)
    >>> attention(q, k, v, scores=own).shape
    torch.Size([1, 2, 50, 16])

    change: a function of PyTorch tensors that broadcast to the shape of `score`; `b`, `h`, `q` and `k` are int64, the
    numbers of batch element, query head, query and key. It is called on many scores at once, of live tiles only, and
    must treat each by itself; b, h, q and k always lie inside the tensors' lengths. tensors: what it reads besides, in
    particular all that gradients are wanted for.

    The reference and the blockwise backend differentiate it by autograd; the Triton kernels refuse it. Raises
    ValueError for a function that captures a tensor that requires gradients, which would get none.
    """
    if not callable(change):
        raise TypeError(f"a function of (score, b, h, q, k, *tensors) must be given; got {type(change).__name__}.")
    for x in tensors:
        if not isinstance(x, Tensor):
            raise TypeError(f"what follows the function must be tensors; got {type(x).__name__}.")
    for cell in getattr(change, "__closure__", None) or ():
        if isinstance(cell.cell_contents, Tensor) and cell.cell_contents.requires_grad:
            raise ValueError(
                "a function must not capture tensors that require gradients, which would get none: pass them after it, "
                "scores.function(change, x), and it gets them as its last arguments."
            )
    return Function(change, tensors)
