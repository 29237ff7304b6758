"""The mask of a model in one forward: its rule, the ranges of its tokens, and its padding."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask as FlexMask

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block
from sparseflash.blockmask.cache import BoundedDict, once
from sparseflash.decode import FEW
from sparseflash.huggingface.rules import Rule, causal_window, fingerprint, first_tokens, rule_mask, unpacked
from sparseflash.interop.sdpa import from_sdpa

_KEPT = 64  # the most masks without padding that are kept, one per lengths and pattern
_masks = BoundedDict(_KEPT)


@dataclass(eq=False, repr=False)
class ModelMask(FlexMask):
    """The scores that a model's own rules leave live in one forward.

    Subclasses FlexAttention's mask only because Transformers passes such masks (and four-dimensional tensors) on
    unchanged. rule: of token positions; batch: the number of rows; padding: bool `[B, >= k_stop]`, True for tokens, or
    None.
    """

    rule: Rule
    batch: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    padding: Tensor | None
    may_cross: bool  # the keys may belong to another sequence
    block: Block
    device: torch.device
    made: dict[Hashable, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, 1, self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]

    @property
    def ndim(self) -> int:
        """Read by models that also take a two-dimensional mask of padding, such as GPT-2."""
        return 4

    def __repr__(self) -> str:
        return f"ModelMask(queries {self.queries}, keys {self.keys}, batch {self.batch})"

    def contiguous(self) -> ModelMask:
        return self

    def to(self, *arguments: Any, **others: Any) -> ModelMask:
        return self

    def __getitem__(self, index: Any) -> ModelMask:
        whole = slice(None)
        if isinstance(index, tuple) and len(index) == 4 and isinstance(index[2], slice):
            start, stop, step = index[2].indices(self.shape[2])
            if (index[0], index[1], index[3]) == (whole, whole, whole) and step == 1 and start < stop:
                first = self.queries[0]
                return replace(self, queries=(first + start, first + stop), made={})
        raise TypeError(_computes("[...]"))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_computes(f".{name}"))

    def __add__(self, other: Any) -> Any:
        raise TypeError(_computes("+"))

    __radd__ = __add__

    def decoding(self, pattern: BlockMask | None, q: Tensor, k: Tensor) -> dict[str, Any] | None:
        """The arguments of `attention_with_cache` for a few new tokens; None if they need a mask of their own."""
        q_len, start = q.shape[2], self.keys[0]
        fits = pattern is None or (
            start == 0 and pattern.lengths is None and q_len <= pattern.block_q
            and pattern.pattern.shape[0] in (1, q.shape[0]) and pattern.pattern.shape[1] in (1, k.shape[1], q.shape[1])
        )  # fmt: skip
        if not may_be_decoded(q_len, k.shape[2]) or not fits or self.may_cross:
            return None
        key = "decoding", id(pattern), q.device
        if key not in self.made:
            self.made[key] = pattern, self._decoding(pattern, q)
        found: dict[str, Any] | None = self.made[key][1]
        return found

    def _decoding(self, pattern: BlockMask | None, q: Tensor) -> dict[str, Any] | None:
        is_causal, window = causal_window(self.rule)
        if not is_causal:
            return None
        found: dict[str, Any] = {"window": window}
        if (live := self._padded_keys()) is not None:
            starts = first_tokens(live)
            if starts is None:
                return None
            found["starts"] = starts.to(q.device)
        if pattern is not None:
            if min(pattern.q_len, pattern.k_len) < self.keys[1]:
                cropped(pattern, self.queries, self.keys)  # says so
            key = "moved", id(pattern), q.device
            found["mask"] = once(_masks, key, lambda: (pattern, pattern.to(q.device)))[1]
        length = self.queries[1] - self.keys[0]
        found["lengths"] = torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
        return found

    def _padded_keys(self) -> Tensor | None:
        """Which keys are tokens, bool `[B, n]`; None if all are, which one kernel finds out. The room of a preallocated
        cache lies after the queries, where a causal rule is dead anyway: it is not read.
        """
        if self.padding is None:
            return None
        stop = min(self.keys[1], self.queries[1]) if causal_window(self.rule)[0] else self.keys[1]
        live = self.padding[:, self.keys[0] : stop]
        return None if bool(live.all()) else live

    def within(self, pattern: BlockMask | None, device: torch.device) -> BlockMask | None:
        """The mask of the scores that both these rules and a pattern leave live; None if every score is live.

        Made once for all layers that share the pattern.
        """
        key = id(pattern), device  # the id is not reused, because the pattern is kept beside the mask
        if key not in self.made:
            self._make(pattern, device)
        found: BlockMask | None = self.made[key][1]
        return found

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _make(self, pattern: BlockMask | None, device: torch.device) -> None:
        mask = self._padded(self._without_padding(pattern))
        self.made[id(pattern), device] = pattern, None if mask is None else mask.to(device)

    def _without_padding(self, pattern: BlockMask | None) -> BlockMask | None:
        if pattern is None and self._sees_everything():
            return None
        rule = fingerprint(self.rule)
        if rule is None or self.shape[2] == 1:  # while generating, every token needs a new mask
            return self._made(pattern)
        key = rule, self.queries, self.keys, self.block, self.device, id(pattern)
        mask: BlockMask = once(_masks, key, lambda: (pattern, self._made(pattern)))[1]
        return mask

    def _sees_everything(self) -> bool:
        from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

        if self.rule is bidirectional_mask_function:
            return True
        return self.rule is causal_mask_function and self.keys[1] <= self.queries[0] + 1

    def _made(self, pattern: BlockMask | None) -> BlockMask:
        if pattern is not None:
            if self.may_cross and self.queries != self.keys:
                raise ValueError(
                    f"a pattern must be for self-attention; got {self.shape[2]} queries and {self.shape[3]} keys of "
                    "another sequence: register a function that returns None for cross-attention modules."
                )
            pattern = cropped(pattern, self.queries, self.keys).to(self.device)
        own = rule_mask(self, pattern)
        return own if pattern is None else own & pattern

    def _padded(self, mask: BlockMask | None) -> BlockMask | None:
        """Lengths would cut queries, too: some models read the outputs of padding, and in cross-attention the queries
        are other tokens.
        """
        if self.padding is None or self._padded_keys() is None:
            return mask
        live = self.padding[:, self.keys[0] : self.keys[1]]
        block = self.block if mask is None else (mask.block_q, mask.block_k)
        seen = from_sdpa(live[:, None, None, :], q_len=self.shape[2], block=block)
        return seen if mask is None else mask & seen


def _computes(how: str) -> str:
    return f"this model computes with its masks ({how}), but sparseflash does not build one before the attention."


def cropped(pattern: BlockMask, queries: tuple[int, int], keys: tuple[int, int]) -> BlockMask:
    """The part of a pattern for these queries and keys."""
    for name, length, stop in (("queries", pattern.q_len, queries[1]), ("keys", pattern.k_len, keys[1])):
        if stop > length:
            raise ValueError(
                f"the pattern must be as long as a row of the batch, with its cache and padding, {stop} tokens; it has "
                f"{length} {name}. Register a longer one: shorter rows use its beginning."
            )
    whole = (queries, keys) == ((0, pattern.q_len), (0, pattern.k_len))
    return pattern if whole else pattern.crop(q=queries, k=keys)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def mask_of_forward(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Rule | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    *,
    block: Block,
    pattern: Any = None,
    **others: Any,
) -> ModelMask:
    """Called by Transformers once per forward; see its `sdpa_mask`. pattern: one for all layers, or a function."""
    if mask_function is None:
        raise ValueError("Transformers must say what the model masks; got no mask_function.")
    if torch.compiler.is_exporting():
        raise NotImplementedError(
            "torch.export must see a mask made of tensors, but sparseflash builds masks outside of the graph; call "
            "model.set_attn_implementation('sdpa') before the export."
        )
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            "attention_mask must have shape [batch, tokens], or be finished, [batch, heads, queries, keys]; got "
            f"{list(attention_mask.shape)}."
        )
    q_start = int(q_offset)
    if attention_mask is not None and (missing := kv_length + kv_offset - attention_mask.shape[-1]) > 0:
        attention_mask = nn.functional.pad(attention_mask, (0, missing))  # the rest of a preallocated cache
    made = ModelMask(
        unpacked(mask_function), batch_size, (q_start, q_start + q_length), (kv_offset, kv_offset + kv_length),
        None if attention_mask is None else attention_mask.bool(), "allow_is_bidirectional_skip" in others,
        block, torch.device("cpu" if torch.device(device).type == "meta" else device),
    )  # fmt: skip
    if not callable(pattern) and not may_be_decoded(q_length, kv_length):
        made.within(pattern, made.device)  # made before the layers run, so that they break no graph
    return made


def may_be_decoded(q_len: int, k_len: int) -> bool:
    """Whether a few new tokens follow a cache, which may need no mask."""
    return q_len <= FEW and k_len != q_len
