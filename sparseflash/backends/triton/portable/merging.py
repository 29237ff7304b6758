"""Launches of the kernels that merge the partial results of chunks (`combine.py`); None where no item is cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.triton.device_functions.combine import (
    TOKENS_TO_COMBINE,
    combine_gradients_kernel,
    combine_means_kernel,
    combine_rows_kernel,
)
from sparseflash.backends.triton.launch.launches import SOME_LENGTHS, strides_of
from sparseflash.backends.triton.launch.merging import bind_merge, merge_launch
from sparseflash.backends.triton.portable.launches import Bound, KernelLayout
from sparseflash.dropout import amplification


class Combine:
    """Launches the kernel that merges partial results, which the chunks of a main kernel wrote to a workspace."""

    def __init__(
        self, of: Bound, layout: KernelLayout, function: Any, numbers_a_token: int, tokens: int,
        constants: Mapping[str, Any], numbers: Mapping[str, Any], examples: Mapping[str, Any],
        names: Mapping[str, str],
    ) -> None:  # fmt: skip
        """numbers_a_token: fp32 numbers of a partial result per token. tokens: tokens per program. names: arguments
        that the main kernel has under another name, as `{name here: name there}`.
        """
        if of.work.merged is None:
            raise RuntimeError("there are no chunks to merge")
        self._names = names
        self._shape, self._device = (of.work.parts, of.tile * numbers_a_token), layout.device
        unbound = merge_launch(function, constants, numbers, examples, layout.device)
        self.launch = bind_merge(unbound, of.work.merged, of.tile, tokens)

    def __call__(self, given: Mapping[str, Any]) -> None:
        self.launch({**given, **{name: given[theirs] for name, theirs in self._names.items()}})

    def workspace(self) -> Tensor:
        return torch.empty(self._shape, dtype=torch.float32, device=self._device)


def combine_rows(
    of: Bound, layout: KernelLayout, written: Mapping[str, Tensor], sink: Mapping[str, Tensor]
) -> Combine | None:
    """Merges out and lse, and in fp32 the maximum and the inverse sum, into `written`.

    Like the functions below, returns None if no item is cut into chunks.
    """
    if of.work.merged is None:
        return None
    numbers, padded_v = layout.numbers, of.choice.padded[1]
    constants = {
        "DV": numbers.dims[1], "PADDED_DV": padded_v, "BLOCK_M": of.tile, "TOKENS": TOKENS_TO_COMBINE,
        "DROPOUT": layout.dropout, "KEEP": "maximum_ptr" in written,
    }  # fmt: skip
    by_name = {
        "lengths_offset": 0, "amplification": amplification(numbers.dropped), "scale": layout.softmax_scale,
        "qk_scale": layout.qk_scale, "heads": numbers.heads, "q_len": numbers.q_len,
        "row_tiles": -(-numbers.q_len // of.tile), "out_strides": strides_of(written["out_ptr"]),
    }  # fmt: skip
    examples = {**written, **({"lengths_ptr": SOME_LENGTHS} if layout.lengths else {}), **sink}
    return Combine(of, layout, combine_rows_kernel, padded_v + 2, TOKENS_TO_COMBINE, constants, by_name, examples, {})


def combine_gradients(of: Bound, layout: KernelLayout, x: Tensor, y: Tensor | None = None) -> Combine | None:
    """Merges dq (`x`), or dk and dv (`x` and `y`)."""
    if of.work.merged is None:
        return None
    numbers, padded, of_keys = layout.numbers, of.choice.padded, y is not None
    length = numbers.k_len if of_keys else numbers.q_len
    constants = {
        "D": numbers.dims[0], "DV": numbers.dims[1], "PADDED_D": padded[0], "PADDED_DV": padded[1], "BLOCK": of.tile,
        "TOKENS": TOKENS_TO_COMBINE, "DROPOUT": layout.dropout,
    }  # fmt: skip
    by_name = {
        "amplification": amplification(numbers.dropped) if of_keys else 1.0, "scale": numbers.scale,
        "heads": numbers.kv_heads if of_keys else numbers.heads, "tokens": length, "tiles": -(-length // of.tile),
        "x_strides": strides_of(x), "y_strides": strides_of(x if y is None else y), "lengths_offset": 0,
    }  # fmt: skip
    examples: dict[str, Any] = {"x_ptr": x}
    names = {"x_ptr": "dq_ptr"}
    if y is not None:
        examples["y_ptr"] = y
        names = {"x_ptr": "dk_ptr", "y_ptr": "dv_ptr"}
        if layout.lengths:  # gradients of queries without keys are 0 anyway
            examples |= {"lengths_ptr": SOME_LENGTHS, "lengths_offset": SOME_LENGTHS.stride(0)}
            names["lengths_offset"] = "lengths_stride"  # lengths: int32 [2, B], queries and then keys
    size = padded[0] + (padded[1] if of_keys else 0)
    return Combine(of, layout, combine_gradients_kernel, size, TOKENS_TO_COMBINE, constants, by_name, examples, names)


def combine_means(of: Bound, layout: KernelLayout, rows: Tensor, sink: Mapping[str, Tensor]) -> Combine | None:
    """Merges the results of dq_kernel with DELTA."""
    if of.work.merged is None:
        return None
    numbers = layout.numbers
    by_name = {"q_len": numbers.q_len, "row_tiles": -(-numbers.q_len // of.tile)}
    examples = {"inverse_ptr": rows, "delta_ptr": rows, "own_inverse_ptr": rows}
    names = {}
    if sink:
        names["maximum_ptr"] = "lse2_ptr"
        by_name["heads"] = numbers.heads
        examples |= {"maximum_ptr": rows, **sink}
    return Combine(of, layout, combine_means_kernel, 3, of.tile, {"BLOCK_M": of.tile}, by_name, examples, names)


def run_kernel(kernel: Bound, combine: Combine | None, given: Mapping[str, Any]) -> None:
    """Launches a kernel, then the kernel that merges its chunks, if any. given: the arguments of both, by name."""
    kernel.work.ready.wait()
    if combine is None:
        kernel.launch(given)
        return
    given = {**given, "parts_ptr": combine.workspace()}
    kernel.launch(given)
    combine(given)
