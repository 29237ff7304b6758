"""torchtitan's inner attention, and a converter that gives it to the layers of a model's config. Needs torchtitan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import spmd_types
from torch import Tensor
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.protocols.model import ModelConfigConverter

from sparseflash.interop.tokens_first import refuse_unless
from sparseflash.masks.causal import causal
from sparseflash.pattern import Pattern, check_pattern
from sparseflash.scores.change import Change, Scores
from sparseflash.varlen import attention_varlen


class SparseAttention(VarlenAttention):  # type: ignore[misc]
    """The inner attention of torchtitan's layers as `attention_varlen`: a pattern within each packed document.

    It takes the place of `VarlenAttention`, with its arguments: `[B, L, N, H]`, and the `VarlenMetadata` that a model
    makes of positions. It computes in the dtype of q, on a CPU, too.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):  # type: ignore[misc]
        """pattern, scores: as for `attention_varlen`. window_size must stay as it is, because the pattern says it."""

        pattern: Pattern | None = causal
        scores: Scores | Change | None = None

    def __init__(self, config: Config) -> None:
        super(VarlenAttention, self).__init__()  # VarlenAttention's own would activate a FlashAttention
        check_pattern(config.pattern)
        refuse_unless(
            tuple(config.window_size) == (-1, 0), "window_size",
            "(-1, 0): pass pattern=functools.partial(masks.local, window=n, causal=True)", config.window_size,
        )  # fmt: skip
        self.pattern, self.scores = config.pattern, config.scores

    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: Any, scale: float | None = None,
        out_transform: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """`[B, L, N, H]`, or the result of `out_transform(out, lse)`, lse being `[B, L, N]`."""
        refuse_unless(
            hasattr(attention_masks, "cu_seq_q"), "attention_masks", "torchtitan's VarlenMetadata", attention_masks
        )
        batch, tokens = q_BLNH.shape[:2]
        sums = attention_masks.cu_seq_q_host or attention_masks.cu_seq_q
        with spmd_types.no_typecheck():
            out, lse = attention_varlen(
                q_BLNH.flatten(0, 1), k_BLNH.flatten(0, 1), v_BLNH.flatten(0, 1), sums, pattern=self.pattern,
                scale=scale, return_lse=True, scores=self.scores,
            )  # fmt: skip
            out = out.unflatten(0, (batch, tokens))
            lse = lse.transpose(0, 1).unflatten(0, (batch, tokens))
        return out if out_transform is None else out_transform(out, lse)


class SparseAttentionConverter(ModelConfigConverter):  # type: ignore[misc]
    """Gives the layers of a model `SparseAttention`. Its config: patterns, one for all layers or one for each; scores,
    for all layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):  # type: ignore[misc]
        patterns: Any = causal
        scores: Any = None

    def __init__(self, config: Config) -> None:
        self._patterns, self._scores = config.patterns, config.scores

    def convert(self, model_config: Any) -> Any:
        layers, patterns = model_config.layers, self._patterns
        if not isinstance(patterns, Sequence):
            patterns = [patterns] * len(layers)
        if len(patterns) != len(layers):
            raise ValueError(
                f"patterns must be one for all layers or one for each of the {len(layers)}; got {len(patterns)}."
            )
        for layer, pattern in zip(layers, patterns, strict=True):
            layer.attention.inner_attention = SparseAttention.Config(pattern=pattern, scores=self._scores)
        return model_config
