"""Hugging Face Transformers: its models with this attention, and optionally a sparsity pattern on top of their masks.
Transformers calls twice: once per forward to build the masks from rules (causal, sliding, packed, padded), and once per
layer for the attention. The first call returns a `ModelMask`, which does not build a mask yet, because a layer's
pattern may leave out most of the scores that the rules allow.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask as FlexMask

from sparseflash.attention import attention
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, block_pair, checked_mask
from sparseflash.blockmask.cache import once
from sparseflash.blockmask.ops.stack import stack_batch
from sparseflash.decode import attention_with_cache
from sparseflash.interop.sdpa import from_sdpa
from sparseflash.interop.transformers_rules import causal_window, fingerprint, first_tokens
from sparseflash.scores.bias import bias
from sparseflash.scores.change import Scores
from sparseflash.scores.sink import sink
from sparseflash.scores.softcap import softcap as softcap_of_scores

Pattern = BlockMask | Callable[[nn.Module], BlockMask | None] | None
Rule = Callable[[Any, Any, Any, Any], Any]  # (batch, head, query, key), as in FlexAttention's mask_mod

_FEW = 16  # new tokens that are decoded, without a mask for them
_KEPT = 64  # the most masks without padding that are kept, one per lengths and pattern
_masks: dict[Hashable, Any] = {}  # kept for later forwards, together with the plans that kernels derive from them
# Arguments of models that change results but can be expressed neither as a mask nor as a change of scores.
_UNKNOWN = {
    "sinks": "a sink for each query",
    "indices": "keys that it chooses itself",
    "block_indices": "blocks that it chooses itself",
    "cache": "a paged cache",
}
_DEAD = -1e4  # models add this or less to dead scores; exp underflows to 0


def register(pattern: Pattern = None, *, name: str = "block_sparse", block: Block = 128) -> None:
    """Makes this attention available to Hugging Face Transformers as `attn_implementation=name`.

    >>> from sparseflash import masks
    >>> register(masks.local(512, window=64, causal=True), name="near")
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=10, **sizes))
    >>> model.set_attn_implementation("near")
    >>> model(torch.zeros(1, 100, dtype=torch.int64)).logits.shape
    torch.Size([1, 100, 10])

    A trained model selects it with `from_pretrained(..., attn_implementation=name)`, an existing one with
    `set_attn_implementation`. Needs `pip install transformers`, 5.23 or newer.

    Tokens that are generated one by one, or up to 16 at a time, are decoded (`decode.attention_with_cache`): no mask is
    built for them, whatever the pattern, if the model's own rule is causal, with or without a window, and padding is on
    the left.

    What a model masks itself stays masked: the future, tokens outside a sliding window or in another packed sequence,
    and the padding of `attention_mask`. Grouped heads, dropout, attention sinks (gpt-oss), soft caps (Gemma 2), biases
    (T5, Swin) and caches work as with Transformers' own implementations. Every layer gives the numbers of `"eager"` up
    to rounding, except that a query without any live key gives 0.

    Args:
        pattern: a mask that restricts the live scores further. Its query i and key j are tokens i and j of a row of the
            batch, counting padding and the contents of a cache, so it must be as long as any row will become (generated
            tokens included); shorter rows use its beginning. Or a function that takes an attention module (in most
            models `getattr(module, "layer_idx", None)` is its number) and returns that module's mask, always the same
            one, or None for no pattern. None: only the models' own masks.
        name: the name by which models select it. Registering a name again gives the new pattern to models that use it.
        block: tokens per side of a tile, for masks without a pattern; others have the pattern's blocks.

    A single pattern applies to every attention that the model computes by this name, also in a vision tower (to
    restrict it to the text: `attn_implementation={"text_config": name}`) and in cross-attention between equally many
    tokens; with other lengths it raises, and a function can tell cross-attention apart. Models with their own attention
    code ignore the name, at most with a warning from Transformers: DeBERTa, Falcon, GPT-J and XLNet, whose
    `model._can_set_attn_implementation()` is False.

    Raises ValueError for the name of another implementation or one that Transformers would interpret differently,
    ImportError if Transformers is missing or too old. Models raise ValueError if a layer needs something that is
    not a mask and no change of scores (keys that it chooses itself, a paged cache), TypeError or AttributeError if
    they compute with their masks themselves. `torch.compile` works without `fullgraph`. Attention weights
    (`output_attentions`) are not available.
    """
    attentions, rules = _interfaces()
    if not name.isidentifier() or "flash" in name:
        raise ValueError(
            "name must be an identifier that does not contain flash, or Transformers would look for a FlashAttention "
            f"or a kernel to load; got {name!r}."
        )
    if name == "eager" or (name in attentions and not isinstance(attentions[name], Attention)):
        raise ValueError(f"name must not be that of another implementation; got {name!r}.")
    block_pair(block)
    if pattern is not None and not callable(pattern):
        checked_mask(pattern)
    type(attentions).register(name, Attention(pattern, block))
    type(rules).register(name, partial(_model_mask, block=block))


def _interfaces() -> tuple[Any, Any]:
    """Transformers' registries of attention functions and of functions that make masks."""
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise ImportError(f"huggingface.register needs Transformers 5.23 or newer ({error}).") from error
    return ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS


@dataclass(eq=False, repr=False)
class ModelMask(FlexMask):
    """The scores that a model's own rules leave live in one forward.

    Subclasses FlexAttention's mask only because Transformers passes such masks (and four-dimensional tensors) on
    unchanged.

    rule: of token positions; batch: the number of rows; padding: bool `[B, >= k_stop]`, True for tokens, or None.
    queries, keys: the ranges `(start, stop)` of the tokens in the attention.
    """

    rule: Rule
    batch: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    padding: Tensor | None
    is_mapped: bool  # the rule takes single numbers only
    may_cross: bool  # the keys may belong to another sequence
    block: Block
    device: torch.device
    made: dict[Hashable, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, 1, self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]

    def __repr__(self) -> str:
        return f"ModelMask(queries {self.queries}, keys {self.keys}, batch {self.batch})"

    def contiguous(self) -> ModelMask:
        return self

    def to(self, *arguments: Any, **others: Any) -> ModelMask:
        return self

    def __getitem__(self, index: Any) -> ModelMask:
        """The mask of a range of queries, `[:, :, start:stop, :]`."""
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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def decoding(self, pattern: BlockMask | None, q: Tensor, k: Tensor) -> dict[str, Any] | None:
        """The arguments of `attention_with_cache` for a few new tokens; None if they need a mask of their own.

        Made once for all layers that share the pattern.
        """
        q_len, start = q.shape[2], self.keys[0]
        fits = pattern is None or (
            start == 0 and pattern.lengths is None and q_len <= pattern.block_q
            and pattern.pattern.shape[0] in (1, q.shape[0]) and pattern.pattern.shape[1] in (1, k.shape[1], q.shape[1])
        )  # fmt: skip
        if q_len > _FEW or k.shape[2] == q_len or not fits or self.may_cross:
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
        if self.padding is not None:
            starts = first_tokens(self.padding, self.keys[0], self.queries[1])
            if starts is None:
                return None
            found["starts"] = starts.to(q.device)
        if pattern is not None:
            if min(pattern.q_len, pattern.k_len) < self.keys[1]:
                cropped(pattern, self.queries, self.keys)  # says so
            key = "moved", id(pattern), q.device
            if key not in _masks and len(_masks) >= _KEPT:
                _masks.clear()
            found["mask"] = once(_masks, key, lambda: (pattern, pattern.to(q.device)))[1]
        length = self.queries[1] - self.keys[0]
        found["lengths"] = torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
        return found

    def within(self, pattern: BlockMask | None, device: torch.device) -> BlockMask | None:
        """The mask of the scores that both these rules and a pattern leave live; None if every score is live.

        Made once for all layers that share the pattern.
        """
        key = id(pattern), device  # the id is not reused, because the pattern is kept beside the mask
        if key not in self.made:
            mask = self._padded(self._without_padding(pattern))
            self.made[key] = pattern, None if mask is None else mask.to(device)
        found: BlockMask | None = self.made[key][1]
        return found

    def _without_padding(self, pattern: BlockMask | None) -> BlockMask | None:
        if pattern is None and self._sees_everything():
            return None
        rule = fingerprint(self.rule)
        if rule is None or self.shape[2] == 1:  # while generating, every token needs a new mask
            return self._made(pattern)
        key = rule, self.queries, self.keys, self.block, self.device, id(pattern)
        if key not in _masks and len(_masks) >= _KEPT:
            _masks.clear()
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
        """The mask without padded keys.

        Lengths would not do, because they cut queries, too: some models read the outputs of padding, and in
        cross-attention the queries are other tokens.
        """
        if self.padding is None:
            return mask
        live = self.padding[:, self.keys[0] : self.keys[1]]
        if bool(live.all()):
            return mask
        block = self.block if mask is None else (mask.block_q, mask.block_k)
        seen = from_sdpa(live[:, None, None, :], q_len=self.shape[2], block=block)
        return seen if mask is None else mask & seen


def _computes(how: str) -> str:
    return f"this model computes with its masks ({how}), but sparseflash does not build one before the attention."


def rule_mask(asked: ModelMask, pattern: BlockMask | None) -> BlockMask:
    """The mask of a model's rule, with a batch of B or 1 and one head, evaluated only in tiles of the pattern."""
    q_len, k_len = asked.queries[1] - asked.queries[0], asked.keys[1] - asked.keys[0]
    block = asked.block if pattern is None else (pattern.block_q, pattern.block_k)
    candidates = None if pattern is None else pattern.to_layout().any(1).any(0)

    def of(batch: int) -> BlockMask:
        def live(q: Tensor, k: Tensor) -> Tensor:
            q, k = q + asked.queries[0], k + asked.keys[0]
            if not asked.is_mapped:
                return torch.as_tensor(asked.rule(batch, 0, q, k), device=q.device)
            return mapped(asked.rule, q.new_tensor(batch), q, k)

        return BlockMask.from_function(live, q_len, k_len, block=block, candidates=candidates, device=asked.device)

    # A rule made of numbers alone is the same for every row, so its mask can be reused for any batch size.
    if asked.batch == 1 or fingerprint(asked.rule) is not None:
        return of(0)
    return stack_batch([of(number) for number in range(asked.batch)])


def mapped(rule: Rule, batch: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Evaluates a rule of single positions at many; see Transformers' `sdpa_mask`."""
    from transformers.masking_utils import TransformGetItemToIndex

    q, k = torch.broadcast_tensors(q, k)
    head = q.new_zeros(())
    with TransformGetItemToIndex():  # lets the rule index tensors with vmap's numbers
        live: Tensor = torch.vmap(lambda q, k: rule(batch, head, q, k))(q.flatten(), k.flatten())
    return live.view(q.shape)


def cropped(pattern: BlockMask, queries: tuple[int, int], keys: tuple[int, int]) -> BlockMask:
    """The part of a pattern for these queries and keys."""
    for name, length, stop in (("queries", pattern.q_len, queries[1]), ("keys", pattern.k_len, keys[1])):
        if stop > length:
            raise ValueError(
                f"the pattern must be as long as a row of the batch, with its cache and padding, {stop} tokens; it has "
                f"{length} {name}."
            )
    whole = (queries, keys) == ((0, pattern.q_len), (0, pattern.k_len))
    return pattern if whole else pattern.crop(q=queries, k=keys)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _model_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Rule | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    use_vmap: bool = False,
    *,
    block: Block,
    **others: Any,
) -> ModelMask:
    """Called by Transformers once per forward; see its `sdpa_mask`."""
    if mask_function is None:
        raise ValueError("Transformers must say what the model masks; got no mask_function.")
    q_start = int(q_offset)
    if attention_mask is not None and (missing := kv_length + kv_offset - attention_mask.shape[-1]) > 0:
        attention_mask = nn.functional.pad(attention_mask, (0, missing))  # the rest of a preallocated cache
    return ModelMask(
        mask_function, batch_size, (q_start, q_start + q_length), (kv_offset, kv_offset + kv_length),
        None if attention_mask is None else attention_mask.bool(), use_vmap, "allow_is_bidirectional_skip" in others,
        block, torch.device(device),
    )  # fmt: skip


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
        """Attention `[B, N, H, D]` of query `[B, H, N, D]`, key and value `[B, Hkv, Nk, D]`.

        s_aux: attention sinks, one score per head that takes part in the softmax but has no value. softcap: of the
        scores. position_bias: `[1, H, N, Nk]`, added to them; so are the finite entries of a finished attention_mask.
        """
        for name, what in _UNKNOWN.items():
            if others.get(name) is not None:
                raise ValueError(
                    f"sparseflash supports masks and changes of scores; {type(module).__name__} needs {what} ({name})."
                )
        added = _finite_part(attention_mask, key.shape[2])
        if position_bias is not None:
            added = position_bias if added is None else added + position_bias
        cached = None
        if softcap is None and added is None:
            cached = self.decoding(module, query, key, value, attention_mask, dropout)
        if cached is not None:
            out, lse = attention_with_cache(query, key, value, **cached, scale=scaling, return_lse=True)
            if s_aux is not None:
                # The sink scales the output by exp(lse) / (exp(lse) + exp(sink)); without a live key lse is -inf, and
                # that is 0.
                out = out * torch.sigmoid(lse - s_aux.view(1, -1, 1).to(lse.dtype))[..., None].to(out.dtype)
        else:
            mask = self.mask_for(module, query, key, attention_mask, is_causal)
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
        attention_mask: ModelMask | Tensor | None,
        dropout: float,
    ) -> dict[str, Any] | None:
        """What decoding needs to know, if the queries are a few new tokens behind a cache; otherwise None."""
        needs_gradients = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        if not isinstance(attention_mask, ModelMask) or dropout or needs_gradients:
            return None
        if key.stride(-1) != 1 or value.stride(-1) != 1:
            return None
        return attention_mask.decoding(self._pattern_of(module), query, key)  # type: ignore[no-any-return]

    def _pattern_of(self, module: nn.Module) -> BlockMask | None:
        pattern = self.pattern if self.pattern is None or isinstance(self.pattern, BlockMask) else self.pattern(module)
        return pattern if pattern is None else checked_mask(pattern)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def mask_for(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        attention_mask: ModelMask | Tensor | None,
        is_causal: bool | None,
    ) -> BlockMask | None:
        """The mask of one layer."""
        pattern = self._pattern_of(module)
        if isinstance(attention_mask, ModelMask):
            return attention_mask.within(pattern, query.device)
        q_len, k_len = query.shape[2], key.shape[2]
        is_causal = attention_mask is None and q_len > 1 and _is_causal(module, is_causal)
        if q_len != k_len and (pattern is not None or is_causal):
            raise ValueError(
                f"{type(module).__name__} must give the positions of its {q_len} queries among {k_len} keys: call the "
                "model with a two-dimensional attention_mask, or none, instead of a finished one."
            )
        if attention_mask is not None:
            live = _live(attention_mask[..., :k_len])
            if pattern is None and bool(live.all()):
                return None
            own = from_sdpa(live, q_len=q_len, block=self.block)
            return own if pattern is None else own & cropped(pattern, (0, q_len), (0, k_len)).to(query.device)
        from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

        rule = causal_mask_function if is_causal else bidirectional_mask_function
        asked = ModelMask(rule, 1, (0, q_len), (0, k_len), None, False, False, self.block, query.device)
        return asked.within(pattern, query.device)


def _is_causal(module: nn.Module, is_causal: bool | None) -> bool:
    """Causality for a call without a mask, as the call or else the module says; "eager" masks nothing in that case."""
    return bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)


def _live(attention_mask: Tensor) -> Tensor:
    """A finished four-dimensional mask as bools."""
    if attention_mask.dtype == torch.bool:
        return attention_mask
    if not attention_mask.is_floating_point():
        raise TypeError(
            f"a four-dimensional attention_mask must be bool or floating point; got {attention_mask.dtype}."
        )
    return attention_mask.detach() > _DEAD


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _finite_part(attention_mask: ModelMask | Tensor | None, k_len: int) -> Tensor | None:
    """What a finished mask adds to live scores; None if it adds nothing."""
    if not isinstance(attention_mask, Tensor) or not attention_mask.is_floating_point():
        return None
    attention_mask = attention_mask[..., :k_len]
    added = attention_mask.masked_fill(~_live(attention_mask), 0.0)
    return added if added.requires_grad or bool((added != 0).any()) else None


def _changes(cap: float | None, added: Tensor | None, sinks: Tensor | None) -> Scores | None:
    """The changes of scores that a model asks for."""
    changes = Scores(())
    if cap is not None:
        changes = changes + softcap_of_scores(cap)
    if added is not None:
        changes = changes + bias(added)
    if sinks is not None:
        changes = changes + sink(sinks.view(-1))
    return changes if changes.changes else None
