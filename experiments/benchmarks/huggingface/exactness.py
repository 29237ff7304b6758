from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from experiments.benchmarks.huggingface.implementations import with_attention
from sparseflash.testing import Comparison, compare_results, draws_for, plain_errors

ZERO = 1e-9  # of the summands' magnitude, because the sum cancels
_FUSED = "sdpa: "
Inputs = Callable[[int], Mapping[str, Tensor]]


class _Fp64Stays(TorchFunctionMode):
    """Keeps fp64, although models cast norms and the softmax to fp32 by name.

    Some versions multiply positions by frequencies in fp64.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is Tensor.float:
            func = Tensor.double
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            named = {name: torch.float64 if each is torch.float32 else each for name, each in named.items()}
        return func(*args, **named)


def results_of(
    model: nn.Module, inputs: Mapping[str, Tensor], call: Callable[..., Any] | None = None
) -> dict[str, Any]:
    model.zero_grad(set_to_none=True)
    out = (model if call is None else call)(**inputs)  # a compiled model has no truth value
    out.loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"logits": out.logits.detach(), **gradients}


class Truth:
    def __init__(self, model: nn.Module) -> None:
        self._exact = copy.deepcopy(model).double()
        self._magnitudes: dict[str, float] = {}
        for name, module in self._exact.named_modules():
            if isinstance(getattr(module, "bias", None), nn.Parameter):
                module.register_forward_hook(partial(self._watch, f"{name}.bias"))

    def _watch(self, name: str, module: nn.Module, given: Any, out: Any) -> None:
        if isinstance(out, Tensor):
            out.register_hook(partial(self._note, name))

    def _note(self, name: str, gradient: Tensor) -> None:
        self._magnitudes[name] = float(gradient.abs().max())

    def __call__(self, inputs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, float]]:
        wide = {name: each.double() if each.is_floating_point() else each for name, each in inputs.items()}
        self._magnitudes.clear()
        with _Fp64Stays():
            results = results_of(self._exact, wide)
        narrow = [name for name, each in results.items() if each.dtype != torch.float64]
        if narrow:
            raise TypeError(f"the truth must be in fp64; got other dtypes of {', '.join(narrow)}.")
        return results, dict(self._magnitudes)


@dataclass(frozen=True)
class Yardstick:
    """Errors of gradients of key biases, which are 0, are the larger of eager's and SDPA's: like this library, SDPA
    subtracts the product of the rounded output and its gradient.
    """

    inputs: Mapping[str, Tensor]
    truth: dict[str, Tensor]
    plain: dict[str, float]
    magnitudes: dict[str, float]

    @classmethod
    def of(cls, model: nn.Module, inputs: Inputs) -> Yardstick:
        if model.config._attn_implementation != "eager":  # type: ignore[union-attr]
            raise ValueError(f"model must have eager attention; got {model.config._attn_implementation}.")  # type: ignore[union-attr]
        truth_of = Truth(model)
        truth, magnitudes = truth_of(inputs(0))
        zeros = [
            name for name, size in magnitudes.items() if name in truth and float(truth[name].abs().max()) < ZERO * size
        ]
        fused = with_attention(model, "sdpa") if zeros else None

        def drawn(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            plain, exact = results_of(model, inputs(seed)), truth if seed == 0 else truth_of(inputs(seed))[0]
            if fused is None:
                return plain, exact
            of_fused = results_of(fused, inputs(seed))
            return plain | {_FUSED + name: of_fused[name] for name in zeros}, exact | {
                _FUSED + name: exact[name] for name in zeros
            }

        errors = plain_errors(map(drawn, range(draws_for(1, 1, learned=True))))
        plain = {name: max(error, errors.get(_FUSED + name, 0.0)) for name, error in errors.items() if name in truth}
        return cls(inputs(0), truth, plain, magnitudes)

    def compare(self, model: nn.Module, call: Callable[..., Any] | None = None) -> Comparison:
        got = results_of(model, self.inputs, call)
        if got.keys() != self.truth.keys():
            raise ValueError(f"every parameter must have a gradient; got others of {got.keys() ^ self.truth.keys()}.")
        return compare_results(got, self.truth, self.plain, magnitudes=self.magnitudes)


def worst(found: Comparison) -> tuple[str, float]:
    return max(found.ratios.items(), key=lambda each: each[1])
