"""A score modification given as a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sparseflash.blockmask.cache import BoundedDict
from sparseflash.blockmask.vectorize import vectorized
from sparseflash.scores.change import Change, Learned, Place, Sizes, on_device
from sparseflash.scores.tracing import Recorded, recorded


@dataclass(frozen=True, eq=False)
class Function(Change, prepared=False):
    """`function(score, b, h, q, k, *tensors)`."""

    kind = "function"
    order = 7
    function: Callable[..., Tensor]
    given: tuple[Tensor, ...]
    derivative: Callable[..., Tensor] | None = None
    kernel: Any = None  # the same as Triton functions: see `function`
    kernel_derivative: Any = None
    _recorded: BoundedDict = field(default_factory=lambda: BoundedDict(16), repr=False)

    @property
    def identity(self) -> object:
        return self._recorded

    def tensors(self) -> tuple[Tensor, ...]:
        return self.given

    def with_tensors(self, tensors: Sequence[Tensor]) -> Function:
        return replace(self, given=tuple(tensors))

    def prepared(self, sizes: Sizes) -> Function:
        for number, x in enumerate(self.given):
            on_device(x, f"tensor {number} of the function", sizes)
        return self

    def recorded(self, device: torch.device) -> tuple[Recorded, int | None]:
        """The function as an expression, and the node of the derivative by the score, if it was given."""
        kept: tuple[Recorded, int | None] | None = self._recorded.get(device)
        if kept is None:
            found, slope = recorded(self.function, self.given, device), None
            if self.derivative is not None:
                second = recorded(self.derivative, self.given, device, into=found)
                found, slope = second._replace(output=found.output), second.output
            # Without the given tensors, which would stay in memory as long as the function.
            kept = self._recorded.put(device, (found._replace(tensors=found.tensors[len(self.given) :]), slope))
        found, slope = kept
        return found._replace(tensors=(*self.given, *found.tensors)), slope

    def changed(self, scores: Tensor, at: Place) -> Tensor:
        return self._of_each("the function", self.function, scores, at)

    def _of_each(self, name: str, function: Callable[..., Tensor], scores: Tensor, at: Place) -> Tensor:
        def checked(found: Any) -> Tensor:
            if not isinstance(found, Tensor):
                raise ValueError(f"{name} must return a score, a tensor; got {type(found).__name__}.")
            return found

        def of_numbers(*numbers: Tensor) -> Any:
            return function(*numbers, *self.given)

        found = vectorized(of_numbers, name, (scores, *at[:4]), checked, "scores")
        return found.to(scores.dtype).expand(scores.shape).contiguous()

    def gradient(self, gradient: Tensor, scores: Tensor, changed: Tensor, at: Place, learned: Learned) -> Tensor:
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_(self.derivative is None)
            tensors = [x.detach().requires_grad_(zeros is not None) for x, zeros in zip(self.given, learned)]
            result = self.with_tensors(tensors).changed(leaf, at)
        first = torch.zeros_like(gradient)
        if self.derivative is not None:
            first = gradient * self._of_each("the derivative", self.derivative, scores.detach(), at)
        leaves = [x for x in (leaf, *tensors) if x.requires_grad]
        _check_leaves(result, leaves)
        if not leaves or not result.requires_grad:  # it may ignore the score
            return first
        found = list(torch.autograd.grad(result, leaves, gradient, allow_unused=True))
        if self.derivative is None:
            own = found.pop(0)
            first = first if own is None else own
        for zeros, other in zip((zeros for zeros in learned if zeros is not None), found, strict=True):
            if other is not None:
                zeros += other
        return first


_CAPTURED = (
    "a function must not capture tensors that require gradients, because they would receive none: pass them as "
    "scores.function(change, x); the function receives them as its last arguments."
)


def _check_leaves(result: Tensor, leaves: Sequence[Tensor]) -> None:
    """Raises ValueError if a result depends on other tensors that require gradients."""
    known = {id(x) for x in leaves}
    seen, rest = set[Any](), [result.grad_fn]
    while rest:
        node = rest.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise ValueError(_CAPTURED)
        rest += [each for each, _ in node.next_functions]


def _check_arguments(name: str, given: Any, tensors: int) -> None:
    try:
        signature = inspect.signature(given, follow_wrapped=False)  # of what is called, not of what it wraps
    except (TypeError, ValueError):  # some C functions have no known signature; what is no function has none
        if callable(given):
            return
        raise TypeError(f"the {name} must be a function; got {type(given).__name__}.") from None
    try:
        signature.bind(*[None] * (5 + tensors))
    except TypeError:
        raise TypeError(
            f"the {name} must take {5 + tensors} arguments: score, b, h, q, k, and then every tensor that follows the "
            f"function; got a function of {signature}."
        ) from None


def function(
    change: Callable[..., Tensor], *tensors: Tensor, derivative: Callable[..., Tensor] | None = None,
    kernel: Any = None, kernel_derivative: Any = None,
) -> Function:  # fmt: skip
    """Replaces every score by `change(score, b, h, q, k, *tensors)`.

    >>> import torch
    >>> from sparseflash import attention, scores
    >>> q, k, v = (torch.randn(1, 2, 50, 16) for _ in range(3))
    >>> gain = torch.ones(2, requires_grad=True)
    >>> own = scores.function(lambda score, b, h, q, k, gain: score * gain[h], gain)
    >>> attention(q, k, v, scores=own).shape
    torch.Size([1, 2, 50, 16])

    Args:
        change: a function of scalar tensors, as a `score_mod` of FlexAttention: the score, and the int64 indices `b`,
            `h`, `q` and `k` of batch element, query head, query and key, never past the sizes of q and k. So
            `bias[h][q, k]` works. `torch.vmap` calls it for all scores of live tiles, dead ones included: there, too,
            its result must be finite or -inf (dead), and its derivative finite.
        tensors: tensors that it reads, in particular every one that needs a gradient.
        derivative: of the result by the score, with the same arguments; by default `change` is differentiated.
        kernel: instead of recording `change`, a `@triton.jit` function `(score, b, h, q, k, *pointers)` that computes
            the same for a tile of scores; `q` and `k` broadcast to it, and the pointers are of the tensors, made
            contiguous. The tensors receive no gradients from it.
        kernel_derivative: the derivative by the score, of the same kind; without it, no backward.

    The PyTorch backends call `change`, and differentiate it by autograd. For the Triton kernels the first call records
    its operations and compiles them, once for all masks. So:

    - keep the result of `scores.function`; a new one is recorded anew;
    - Python numbers that `change` reads, also from captured tensors, are constants of the kernels;
    - `change` must not read the values of its arguments in Python (`item()`, `if`), nor change them in place; both
      raise an error.

    The kernels take:

    - operations on single scores: arithmetic, comparisons, logic, `where`, `masked_fill`, `clamp`, minimum and maximum,
      `abs`, `floor`, `ceil`, `sign`, powers with a constant exponent, exponentials and logarithms, `sqrt`, `sin`,
      `cos`, `tanh`, `erf`, `sigmoid`, `relu`, `silu`, `gelu`, `softplus`, `detach` (but not `torch.no_grad()`), in
      fp32, integers in 64 bits where 32 are too few.
    - entries of tensors: every dimension is indexed, by integers computed from b, h, q and k or read from other
      tensors: `table[h, (k - q).clamp(-8, 8) + 8]`, `document[b, q] == document[b, k]`. An entry outside its tensor
      makes the score NaN. Tensors without dimensions are numbers.
    - `torch.dot` of two such rows of at most 256 numbers, `torch.dot(x[b, h, q], y[b, k])`. Features appended to q and
      k (`torch.cat`) are faster.
    - gradients of a tensor that is indexed by b, h, q and k themselves, or of a table with at most 16,384 entries for
      each b and h, summed in a fixed order: the same bits every time. The time for a table grows with the number of
      different entries that a tile reads.

    Raises ValueError for a function that captures a tensor that requires gradients; at the call, for one that the
    kernels do not take.
    """
    if not callable(change):
        raise TypeError(f"a function of (score, b, h, q, k, *tensors) must be given; got {type(change).__name__}.")
    for x in tensors:
        if not isinstance(x, Tensor):
            raise TypeError(f"what follows the function must be tensors; got {type(x).__name__}.")
    if kernel is None and kernel_derivative is not None:
        raise TypeError(
            "kernel_derivative must come with a kernel; got no kernel. derivative= takes PyTorch functions."
        )
    functions = {"function": change} if derivative is None else {"function": change, "derivative": derivative}
    for name, each in () if torch.compiler.is_compiling() else functions.items():
        _check_arguments(name, each, len(tensors))
        for cell in getattr(each, "__closure__", None) or ():
            if isinstance(cell.cell_contents, Tensor) and cell.cell_contents.requires_grad:
                raise ValueError(_CAPTURED)
    return Function(change, tensors, derivative, kernel, kernel_derivative)
