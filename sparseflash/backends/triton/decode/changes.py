"""Score modifications in the decoding kernel: a soft cap, a decay with distance, a table by distance, key biases."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.changes.softcap import tanh
from sparseflash.backends.triton.device_functions.softmax import LN2
from sparseflash.scores.change import Scores


@triton.jit
def changed(
    scores, live, position, key, batch, of_head, cap, slopes_ptr, relative_ptr, buckets_ptr, key_bias_ptr, entries,
    bias_batch, bias_head, bias_token, SHAPE: tl.constexpr,
):  # fmt: skip
    """The modified scores `[M, N]`, in the order of `sparseflash.scores.Scores`.

    live: which scores; nothing is read for others. position, of_head: of the rows' queries; key: of the columns.
    """
    if SHAPE.CAPPED:
        scores = tanh(scores / cap, SHAPE.HARDWARE_TANH) * cap
    distance = position[:, None] - key[None, :]  # at least 0 where live
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + of_head).to(tl.float32)
        apart = tl.maximum(distance, 0).to(tl.float32)
        if SHAPE.IS_LOG:
            apart = tl.log2(1.0 + apart) * LN2
        scores = tl.fma(-slope[:, None], apart, scores)
    if relative_ptr is not None:
        bucket = tl.load(buckets_ptr + distance, mask=live, other=0)
        scores += tl.load(relative_ptr + of_head[:, None] * entries + bucket, mask=live, other=0.0).to(tl.float32)
    if key_bias_ptr is not None:
        at = batch * bias_batch + of_head.to(tl.int64)[:, None] * bias_head + key[None, :].to(tl.int64) * bias_token
        scores += tl.load(key_bias_ptr + at, mask=live, other=0.0).to(tl.float32)
    return scores


class Changes(NamedTuple):
    """The arguments of the kernels for some score modifications."""

    tensors: tuple[Tensor | None, ...]  # slopes, table, buckets, key biases, sink: those that each call passes
    numbers: tuple[Any, ...]  # the cap, entries of a head in the table, strides of the key biases
    constants: tuple[bool, bool, bool]  # whether there is a cap, whether the decay is logarithmic, whether any is there

    @classmethod
    def of(cls, changes: Scores | None) -> Changes:
        if changes is None:
            return _NONE
        cap, distance, codes, bias, sink = map(
            changes.find, ("softcap", "distance", "relative", "key_bias", "sink")
        )  # fmt: skip
        strides = [0, 0, 0]
        if bias is not None:
            values = bias.values
            strides = [stride if n > 1 else 0 for n, stride in zip(values.shape, values.stride(), strict=True)]
        tensors = (
            None if distance is None else distance.slopes.contiguous(),
            *((None, None) if codes is None else (codes.table.contiguous(), codes.buckets)),
            None if bias is None else bias.values,
            None if sink is None else sink.logits.contiguous(),
        )
        numbers = 1.0 if cap is None else cap.cap, 0 if codes is None else codes.table.shape[1], *strides
        return cls(tensors, numbers, (cap is not None, distance is not None and bool(distance.is_log), True))


_NONE = Changes((None,) * 5, (1.0, 0, 0, 0, 0), (False, False, False))
