"""Megatron-core's `core_attention`, computed by `attention`. Needs Megatron-core (tested with 0.16)."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from sparseflash.attention import attention
from sparseflash.interop.flash_attn_varlen import Within
from sparseflash.interop.sdpa import from_sdpa
from sparseflash.interop.tokens_first import refuse_unless
from sparseflash.masks.causal import causal
from sparseflash.nn.layer_mask import LayerMask
from sparseflash.pattern import Pattern, check_pattern
from sparseflash.scores import sink
from sparseflash.varlen import attention_varlen

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)


class SparseDotProductAttention(DotProductAttention):  # type: ignore[misc]
    """The `core_attention` of Megatron-core's layer specs over the live scores of a pattern.

    Args:
        pattern: the live scores: a function of the length, such as `masks.causal`, or a rule of positions `(q, k)`, as
            for `attention_varlen`. None: what the layer asks for: causal or all, a window (`window_size` of the
            config), or `attention_mask`.
        others: as of `DotProductAttention`, whose scale, window, softmax offset (as a sink) and dropout are kept.

    In a spec, `functools.partial(SparseDotProductAttention, pattern=...)` gives the pattern. Packed sequences
    (`packed_seq_params`) are taken, without padding between them; key heads stay grouped.
    """

    def __init__(self, *args: Any, pattern: Pattern | None = None, **others: Any) -> None:
        super().__init__(*args, **others)
        check_pattern(pattern)
        self._pattern = pattern
        window = self.scale_mask_softmax.window_size
        own: Pattern | None = pattern
        if own is None and window is not None:
            left, right = window
            own = Within(None if left < 0 else left, max(right, 0), 128)
        elif own is None and self.attn_mask_type in _CAUSAL:
            own = causal
        self._within = own
        self._mask = LayerMask(own)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None, attention_bias: Tensor | None = None, packed_seq_params: Any = None,
    ) -> Tensor:  # fmt: skip
        """`[Nq, B, Hq, D]` as `[Nq, B, Hq * D]`, or packed `[total_q, Hq, D]` as `[total_q, Hq * D]`."""
        refuse_unless(attention_bias is None, "attention_bias", "None, as for DotProductAttention", "a tensor")
        options: dict[str, Any] = {
            "scale": self.softmax_scale * (self.scale_mask_softmax.scale or 1.0),
            "scores": None if self.softmax_offset is None else sink(self.softmax_offset),
            "dropout_p": self.attention_dropout.p if self.training else 0.0,
        }
        if packed_seq_params is not None:
            sums = _running_sums(packed_seq_params)
            packed: Tensor = attention_varlen(query, key, value, *sums, self._within, **options)
            return packed.flatten(1)
        refuse_unless(
            attention_mask is None or self._pattern is None, "attention_mask",
            "None with a pattern, which says what is live (create_attention_mask_in_dataloader=False)", "a tensor",
        )  # fmt: skip
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if attention_mask is None or self.scale_mask_softmax.window_size is not None:
            mask = self._mask(q.shape[2], k.shape[2], q.device)
        else:
            mask = from_sdpa(~attention_mask, q_len=q.shape[2])  # True: dead
        out: Tensor = attention(q, k, v, mask, **options)
        return out.permute(2, 0, 1, 3).flatten(2)


def _running_sums(packed: Any) -> tuple[Tensor, Tensor]:
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        padded = getattr(packed, f"{name}_padded")
        refuse_unless(
            padded is None or padded is getattr(packed, name), f"{name}_padded",
            "None: pack sequences without padding between them", "a tensor",
        )  # fmt: skip
    return packed.cu_seqlens_q, packed.cu_seqlens_kv
