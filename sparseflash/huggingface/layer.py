"""The attention of one layer of a model, as Transformers calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sparseflash.attention import attention
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, block_pair, checked_mask
from sparseflash.decode import attention_with_cache
from sparseflash.huggingface.model_mask import ModelMask, cropped, may_be_decoded
from sparseflash.interop.sdpa import from_sdpa
from sparseflash.scores.bias import bias
from sparseflash.scores.change import Scores
from sparseflash.scores.sink import sink
from sparseflash.scores.softcap import softcap as softcap_of_scores

Pattern = BlockMask | Callable[[nn.Module], BlockMask | None] | None

_UNKNOWN = {
    "sinks": "a sink for each query",
    "indices": "keys that it chooses itself",
    "block_indices": "blocks that it chooses itself",
    "cache": "a paged cache",
    "output_attentions": "its weights as a result: select 'eager' for it",
}
_DEAD = -9984.0  # models add -10,000 (in bf16 this) or less to dead scores; exp underflows to 0


class Attention:
    """Called by Transformers once per layer; see its `sdpa_attention_forward`."""

    def __init__(self, pattern: Pattern, block: Block) -> None:
        self.pattern, self.block = pattern, block

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: ModelMask | Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        softcap: float | None = None,
        position_bias: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attention `[B, N, H, D]` of query `[B, H, N, D]`, key and value `[B, Hkv, Nk, D]`. s_aux: attention sinks,
        one score per head that takes part in the softmax but has no value. softcap: of the scores. position_bias:
        `[1, H, N, Nk]`, added to the scores, as are the finite entries of a finished attention_mask.
        """
        for name, what in _UNKNOWN.items():
            given = others.get(name)
            if given is not None and given is not False:
                raise ValueError(
                    f"sparseflash supports masks and score modifications; {type(module).__name__} needs {what} "
                    f"({name})."
                )
        live, added = None, None
        if isinstance(attention_mask, Tensor):
            finished = _checked(attention_mask, query.shape[2], key.shape[2])
            block_q, block_k = block_pair(self.block)
            if query.shape[2] <= block_q and key.shape[2] <= block_k:
                added = _as_bias(finished, query.dtype)
            else:
                live, added = _parts(finished)
        if position_bias is not None:
            added = position_bias if added is None else added + position_bias
        cached = None
        if added is None and may_be_decoded(query.shape[2], key.shape[2]):
            cached = self.decoding(module, query, key, value, s_aux, attention_mask, dropout)
        if cached is not None:
            changes = _changes(softcap, None, s_aux)
            out = attention_with_cache(query, key, value, **cached, scale=scaling, scores=changes)
        else:
            # `mask_for` breaks a compiled graph, so it is called only for a mask that does not exist yet.
            is_causal = _is_causal(module, query, attention_mask, is_causal)
            if isinstance(attention_mask, ModelMask) and not callable(self.pattern):
                mask = attention_mask.within(self.pattern, query.device)
            elif isinstance(attention_mask, ModelMask) or self.pattern is not None or live is not None or is_causal:
                mask = self.mask_for(module, query, key, attention_mask, live, is_causal)
            else:
                mask = None
            changes = _changes(softcap, added, s_aux)
            out = attention(query, key, value, mask, scale=scaling, dropout_p=dropout, scores=changes)
        return out.transpose(1, 2).contiguous(), None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def decoding(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        attention_mask: ModelMask | Tensor | None,
        dropout: float,
    ) -> dict[str, Any] | None:
        """The arguments of decoding, if the queries are a few new tokens behind a cache; otherwise None."""
        learned = [x for x in (query, key, value, sinks) if x is not None and x.requires_grad]
        needs_gradients = torch.is_grad_enabled() and learned
        if not isinstance(attention_mask, ModelMask) or dropout or needs_gradients:
            return None
        if key.stride(-1) != 1 or value.stride(-1) != 1:
            return None
        return attention_mask.decoding(self._pattern_of(module), query, key)

    def _pattern_of(self, module: nn.Module) -> BlockMask | None:
        if self.pattern is None or isinstance(self.pattern, BlockMask):
            return self.pattern
        try:
            pattern = self.pattern(module)
        except TypeError as error:  # as masks.local(n) raises, if n is the module
            reason = str(error).partition("\n")[0].partition("; got")[0]
            raise TypeError(
                f"pattern must be a mask or a function of an attention module; called with {type(module).__name__}, it "
                f"raises {reason!r}. Instead of a function of the length, register the mask of the longest sequence, "
                "such as register(masks.causal(4096))."
            ) from error
        return pattern if pattern is None else checked_mask(pattern)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def mask_for(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        attention_mask: ModelMask | Tensor | None,
        live: Tensor | None,
        is_causal: bool,
    ) -> BlockMask | None:
        """The mask of one layer. live: the live scores of a finished attention_mask, or None for all of them."""
        pattern = self._pattern_of(module)
        if isinstance(attention_mask, ModelMask):
            return attention_mask.within(pattern, query.device)
        q_len, k_len = query.shape[2], key.shape[2]
        if q_len != k_len and (pattern is not None or is_causal):
            raise ValueError(
                f"{type(module).__name__} must give the positions of its {q_len} queries among {k_len} keys: call the "
                "model with a two-dimensional attention_mask, or none, instead of a finished one."
            )
        if attention_mask is not None:
            own = None if live is None else from_sdpa(live, q_len=q_len, block=self.block)
            if pattern is None:
                return own
            pattern = cropped(pattern, (0, q_len), (0, k_len)).to(query.device)
            return pattern if own is None else own & pattern
        from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

        rule = causal_mask_function if is_causal else bidirectional_mask_function
        asked = ModelMask(rule, 1, (0, q_len), (0, k_len), None, False, self.block, query.device)
        return asked.within(pattern, query.device)


def _is_causal(
    module: nn.Module, query: Tensor, attention_mask: ModelMask | Tensor | None, is_causal: bool | None
) -> bool:
    """Whether a call without a mask is causal, by the call or else the module; "eager" masks nothing in that case."""
    if attention_mask is not None or query.shape[2] == 1:
        return False
    return bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)


def _checked(attention_mask: Tensor, q_len: int, k_len: int) -> Tensor:
    """A finished mask as `[B or 1, H or 1, N or 1, Nk]`, without the room of a preallocated cache."""
    if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
        raise TypeError(
            f"a four-dimensional attention_mask must be bool or floating point; got {attention_mask.dtype}."
        )
    finished = attention_mask[(None,) * (4 - attention_mask.ndim)][..., :k_len]
    if finished.shape[3] != k_len or finished.shape[2] not in (1, q_len):
        raise ValueError(
            f"a finished attention_mask must be of {q_len} queries, or 1, and {k_len} keys; got shape "
            f"{tuple(attention_mask.shape)}."
        )
    return finished


def _as_bias(attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A finished four-dimensional mask of at most one block as a bias, -inf for dead scores.

    dtype: of the bias, for a bool mask. A mask of one block saves no work, and reading it would make the host wait for
    the device in every layer.
    """
    if attention_mask.dtype == torch.bool:
        return torch.where(attention_mask, attention_mask.new_zeros((), dtype=dtype), -torch.inf)
    # Compared in its dtype, as in _parts; but NaN stays.
    return torch.nn.functional.threshold(attention_mask, _DEAD, -torch.inf)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _parts(attention_mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """`(live scores, None: all; bias, None: nothing)` of a finished four-dimensional mask.

    Synchronises with the device once.
    """
    if attention_mask.dtype == torch.bool:
        return (None if bool(attention_mask.all()) else attention_mask), None
    live = attention_mask.detach() > _DEAD
    is_whole, adds = torch.stack((live.all(), (live & (attention_mask != 0)).any())).tolist()
    added = None
    if adds or attention_mask.requires_grad:
        added = attention_mask if is_whole else attention_mask.masked_fill(~live, 0.0)
    return (None if is_whole else live), added


def _changes(cap: float | None, added: Tensor | None, sinks: Tensor | None) -> Scores | None:
    if cap is None and added is None and sinks is None:
        return None
    changes = Scores(())
    if cap is not None:
        changes = changes + softcap_of_scores(cap)
    if added is not None:
        changes = changes + bias(added)
    if sinks is not None:
        changes = changes + sink(sinks.view(-1))
    return changes
