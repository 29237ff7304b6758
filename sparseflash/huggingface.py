"""Hugging Face Transformers: its models with this attention, and with a pattern over what they mask themselves.

A model asks twice: once for each forward what its masks are, in rules (causal, sliding, packed, padded), and once a
layer for the attention. The first answer is `ModelMask`, which makes no mask yet, because a layer may have a pattern
that leaves most of the rule's scores out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask as FlexMask

from sparseflash.attention import attention
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, block_pair, checked_mask
from sparseflash.blockmask.cache import once
from sparseflash.blockmask.ops.stack import stack_batch
from sparseflash.interop.sdpa import from_sdpa

Pattern = BlockMask | Callable[[nn.Module], BlockMask | None] | None
Rule = Callable[[Any, Any, Any, Any], Any]  # (batch, head, query, key), as FlexAttention's mask_mod

_RULES = "transformers.masking_utils"
_KEPT = 64  # masks without padding: of some lengths and patterns
_masks: dict[Hashable, Any] = {}  # kept for the next forwards, with the plans that the kernels derive from them
# What models hand over that changes results and is no mask.
_UNKNOWN = {
    "softcap": "a soft cap of the scores",
    "position_bias": "a bias of the scores",
    "sinks": "a sink of each query",
    "indices": "keys that it chooses itself",
    "block_indices": "blocks that it chooses itself",
    "cache": "a paged cache",
}
_DEAD = -1e4  # what models add to scores that are to be dead, or less: no softmax has a weight that small


def register(pattern: Pattern = None, *, name: str = "block_sparse", block: Block = 128) -> None:
    """Make `attn_implementation=name` of Hugging Face Transformers this attention.

    What a model masks itself stays masked: the future, what lies outside a sliding window or in another packed
    sequence, and the padding of `attention_mask`. Grouped heads, dropout, attention sinks and caches work as they do
    with its own implementations; every layer gives the numbers of `"eager"` up to rounding, but that a query without
    any live key gives 0.

    Args:
        pattern: a mask of which scores may be live besides. Query i and key j of it are the tokens i and j of a row of
            the batch, padding and what a cache holds counted, so it must be as long as any row will be (generated
            tokens too); what is shorter sees the beginning of it. Or a function that is given an attention module
            (`getattr(module, "layer_idx", None)` is its number, in most models) and returns its mask, one and the same
            for a module each time, or None for one without a pattern. None: the models' own masks.
        name: how models are told to use it. Registered again, a name stands for the new pattern in models that use it.
        block: tokens along the sides of a tile, in masks without a pattern; those with one have its blocks.

    One pattern is that of every attention which the model computes by this name: also of a vision tower (for the text
    alone: `attn_implementation={"text_config": name}`) and, where both sides have equally many tokens, of
    cross-attention (a function can tell them apart; with other lengths it is an error). Models whose code has an
    attention of its own ignore the name, at most with a warning of Transformers: DeBERTa, Falcon, GPT-J, XLNet, all of
    which `model._can_set_attn_implementation()` is False.

    Raises ValueError for the name of another implementation, or one that Transformers would read as something else,
    ImportError where Transformers is missing or too old. Models raise ValueError where a layer needs what is no mask
    (a soft cap or a bias of the scores, an additive `attention_mask` with finite values, keys that it chooses itself, a
    paged cache), TypeError or AttributeError where they compute with their masks themselves. `torch.compile` takes them
    without `fullgraph`. Weights of the attention (`output_attentions`) there are none.

    Needs `pip install transformers`, 5.23 or newer. A trained model takes it by
    `from_pretrained(..., attn_implementation=name)`, one that is there by `set_attn_implementation`:

    >>> from sparseflash import masks
    >>> register(masks.local(512, window=64, causal=True), name="near")
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=10, **sizes))
    >>> model.set_attn_implementation("near")
    >>> model(torch.zeros(1, 100, dtype=torch.int64)).logits.shape
    torch.Size([1, 100, 10])
    """
    attentions, rules = _interfaces()
    if not name.isidentifier() or "flash" in name:
        raise ValueError(
            "name must be a word without the letters flash, by which Transformers would look for a FlashAttention or a "
            f"kernel to load; got {name!r}."
        )
    if name == "eager" or (name in attentions and not isinstance(attentions[name], Attention)):
        raise ValueError(f"name must not be that of another implementation; got {name!r}.")
    block_pair(block)
    if pattern is not None and not callable(pattern):
        checked_mask(pattern)
    type(attentions).register(name, Attention(pattern, block))
    type(rules).register(name, partial(_model_mask, block=block))


def _interfaces() -> tuple[Any, Any]:
    """Transformers' tables of attention functions and of functions that make masks."""
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise ImportError(f"huggingface.register needs Transformers 5.23 or newer ({error}).") from error
    return ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS


@dataclass(eq=False, repr=False)
class ModelMask(FlexMask):
    """The scores that a model's own rules leave live, of one forward.

    A FlexAttention mask by name only: those, and tensors of four dimensions, Transformers takes for finished.

    rule: of token positions; batch: how many rows; padding: bool `[B, >= k_stop]`, True for tokens, or None.
    queries, keys: the tokens that the attention sees, from and to.
    """

    rule: Rule
    batch: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    padding: Tensor | None
    is_mapped: bool  # the rule knows single numbers only
    may_cross: bool  # the keys may be another sequence's
    block: Block
    device: torch.device
    made: dict[Hashable, tuple[BlockMask | None, BlockMask | None]] = field(default_factory=dict)

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
        """Of some queries, `[:, :, start:stop, :]`."""
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

    def within(self, pattern: BlockMask | None, device: torch.device) -> BlockMask | None:
        """The mask of the scores that are live by these rules and by a pattern, made once for all layers with it; None
        where all are."""
        key = id(pattern), device  # whose number nobody else gets, for it is kept beside the mask
        if key not in self.made:
            mask = self._padded(self._without_padding(pattern))
            self.made[key] = pattern, None if mask is None else mask.to(device)
        return self.made[key][1]

    def _without_padding(self, pattern: BlockMask | None) -> BlockMask | None:
        if pattern is None and self._sees_everything():
            return None
        rule = fingerprint(self.rule)
        if rule is None or self.shape[2] == 1:  # generating, every token has a mask of its own
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
                    f"a pattern is for self-attention; got {self.shape[2]} queries and {self.shape[3]} keys of another "
                    "sequence: register a function that returns None for the modules of cross-attention."
                )
            pattern = cropped(pattern, self.queries, self.keys).to(self.device)
        own = rule_mask(self, pattern)
        return own if pattern is None else own & pattern

    def _padded(self, mask: BlockMask | None) -> BlockMask | None:
        """The mask without padded keys. Not its lengths: they would cut the queries of padding, too, which some models
        read, and those of cross-attention."""
        if self.padding is None:
            return mask
        live = self.padding[:, self.keys[0] : self.keys[1]]
        if bool(live.all()):
            return mask
        block = self.block if mask is None else (mask.block_q, mask.block_k)
        seen = from_sdpa(live[:, None, None, :], q_len=self.shape[2], block=block)
        return seen if mask is None else mask & seen


def _computes(how: str) -> str:
    return f"this model computes with its masks ({how}), and sparseflash has none before the attention."


def fingerprint(rule: Any) -> Hashable | None:
    """What makes two rules the same, of rules that Transformers has put together from numbers and other rules; None for
    those that see tensors, and for a user's own."""
    if isinstance(rule, int | float | str | bool | None):
        return (type(rule), rule)
    if isinstance(rule, tuple):
        parts = tuple(map(fingerprint, rule))
        return None if None in parts else parts
    if not isinstance(rule, FunctionType) or rule.__module__ != _RULES or rule.__defaults__ or rule.__kwdefaults__:
        return None
    cells = fingerprint(tuple(cell.cell_contents for cell in rule.__closure__ or ()))
    return None if cells is None else (rule.__code__, cells)


def rule_mask(asked: ModelMask, pattern: BlockMask | None) -> BlockMask:
    """The mask of a model's rule, `[B or 1, 1]` heads, looked at where a pattern has tiles."""
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

    # What is made of numbers alone has nothing to look up for a row, and is kept for batches of any size.
    if asked.batch == 1 or fingerprint(asked.rule) is not None:
        return of(0)
    return stack_batch([of(number) for number in range(asked.batch)])


def mapped(rule: Rule, batch: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A rule of single positions, asked about many; see Transformers' `sdpa_mask`."""
    from transformers.masking_utils import TransformGetItemToIndex

    q, k = torch.broadcast_tensors(q, k)
    head = q.new_zeros(())
    with TransformGetItemToIndex():  # else no tensor can be indexed with one of vmap's numbers
        live: Tensor = torch.vmap(lambda q, k: rule(batch, head, q, k))(q.flatten(), k.flatten())
    return live.view(q.shape)


def cropped(pattern: BlockMask, queries: tuple[int, int], keys: tuple[int, int]) -> BlockMask:
    """The part of a pattern that these tokens see."""
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
    """What Transformers calls once a forward; see its `sdpa_mask`."""
    if mask_function is None:
        raise ValueError("Transformers must say what the model masks; got no mask_function.")
    q_start = int(q_offset)
    if attention_mask is not None and (missing := kv_length + kv_offset - attention_mask.shape[-1]) > 0:
        attention_mask = nn.functional.pad(attention_mask, (0, missing))  # room in a cache for what comes
    return ModelMask(
        mask_function, batch_size, (q_start, q_start + q_length), (kv_offset, kv_offset + kv_length),
        None if attention_mask is None else attention_mask.bool(), use_vmap, "allow_is_bidirectional_skip" in others,
        block, torch.device(device),
    )  # fmt: skip


class Attention:
    """What Transformers calls once a layer; see its `sdpa_attention_forward`."""

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
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attention `[B, N, H, D]` of query `[B, H, N, D]`, key and value `[B, Hkv, Nk, D]`.

        s_aux: attention sinks, a score for each head that takes part in the softmax and has no value.
        """
        for name, what in _UNKNOWN.items():
            if others.get(name) is not None:
                raise ValueError(f"sparseflash has masks only; {type(module).__name__} asks for {what} ({name}).")
        mask = self.mask_for(module, query, key, attention_mask, is_causal)
        if s_aux is None:
            out = attention(query, key, value, mask, scale=scaling, dropout_p=dropout)
        else:
            out, lse = attention(query, key, value, mask, scale=scaling, dropout_p=dropout, return_lse=True)
            # exp(lse) / (exp(lse) + exp(sink)); without a live key lse is -inf, and the sink takes all.
            out = out * torch.sigmoid(lse - s_aux.view(1, -1, 1).to(lse.dtype))[..., None].to(out.dtype)
        return out.transpose(1, 2).contiguous(), None

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
        pattern = self.pattern if self.pattern is None or isinstance(self.pattern, BlockMask) else self.pattern(module)
        if pattern is not None:
            checked_mask(pattern)
        if isinstance(attention_mask, ModelMask):
            return attention_mask.within(pattern, query.device)
        q_len, k_len = query.shape[2], key.shape[2]
        is_causal = attention_mask is None and q_len > 1 and _is_causal(module, is_causal)
        if q_len != k_len and (pattern is not None or is_causal):
            raise ValueError(
                f"{type(module).__name__} must say where its {q_len} queries stand among {k_len} keys: call the model "
                "with an attention_mask of two dimensions, or none, instead of a finished one."
            )
        if attention_mask is not None:
            own = from_sdpa(_live(attention_mask[..., :k_len]), q_len=q_len, block=self.block)
            return own if pattern is None else own & cropped(pattern, (0, q_len), (0, k_len)).to(query.device)
        from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

        rule = causal_mask_function if is_causal else bidirectional_mask_function
        asked = ModelMask(rule, 1, (0, q_len), (0, k_len), None, False, False, self.block, query.device)
        return asked.within(pattern, query.device)


def _is_causal(module: nn.Module, is_causal: bool | None) -> bool:
    """Of a model that masks nothing: what it says of the call, or of the module; in "eager" nothing is masked then."""
    return bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)


def _live(attention_mask: Tensor) -> Tensor:
    """A finished mask of four dimensions as bools."""
    if attention_mask.dtype == torch.bool:
        return attention_mask
    if not attention_mask.is_floating_point():
        raise TypeError(
            f"an attention_mask of four dimensions must be bool or floating point; got {attention_mask.dtype}."
        )
    live = attention_mask == 0
    if bool((~live & ~(attention_mask <= _DEAD)).any()):
        raise ValueError(f"attention_mask must hold 0, and {_DEAD:g} or less where scores are dead: a bias is no mask.")
    return live
