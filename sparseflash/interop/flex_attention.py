"""FlexAttention's functions, with its arguments: change the import, and keep the calls.

Not compiled: `torch.compile(flex_attention)` and `torch.compile(create_block_mask)` are not needed, and are not faster.
The other functions and classes of FlexAttention that go with them can be imported from here, too.

>>> from sparseflash.interop.flex_attention import and_masks, create_block_mask
>>> near = and_masks(lambda b, h, q, k: k <= q, lambda b, h, q, k: q - k < 64)
>>> create_block_mask(near, None, None, 256, 256, device="cpu")
BlockMask(256 x 256, blocks of 128, 3 tiles: 0 full + 3 partial (2 distinct), density 21.9 %)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparseflash.attention import Backend, attention
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, dense_tensor, flag
from sparseflash.blockmask.cache import BoundedDict, is_countable
from sparseflash.blockmask.number import Number
from sparseflash.captured import Captured
from sparseflash.interop.flex import from_flex
from sparseflash.interop.flex_blocks import supported
from sparseflash.interop.score_mods import changes_of
from sparseflash.interop.tokens_first import refuse_unless
from sparseflash.masks.causal import is_causal
from sparseflash.scores.change import Change, Scores

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxRequest
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

_THEIRS = ("AuxOutput", "AuxRequest", "FlexKernelOptions", "and_masks", "create_mask", "noop_mask", "or_masks")
_KERNEL_CHOICES = (
    "BACKEND", "BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "BLOCKS_ARE_CONTIGUOUS",
    "FORCE_USE_FLEX_ATTENTION", "num_stages", "num_warps", "PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "USE_TMA",
    "SPLIT_KV", "WRITE_DQ", "kpack", "matrix_instr_nonkdim", "waves_per_eu",
)  # fmt: skip
_NUMBERS = (("batch element", "B"), ("head", "H"))
_converted = BoundedDict(32)


def __getattr__(name: str) -> Any:
    if name not in _THEIRS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch.nn.attention.flex_attention as theirs

    return getattr(theirs, name)


def create_block_mask(
    mask_mod: Callable[..., Tensor], B: int | None, H: int | None, Q_LEN: int, KV_LEN: int,
    device: torch.device | str | None = None, BLOCK_SIZE: Block = 128, _compile: bool = False,
    separate_full_blocks: bool = True, compute_dq_write_order: bool = False, dq_kv_order: bool = True,
) -> BlockMask:  # fmt: skip
    """`create_block_mask` of FlexAttention, which returns a `BlockMask` of this library.

    >>> create_block_mask(lambda b, h, q, k: k <= q, None, None, 256, 256, device="cpu", BLOCK_SIZE=64)
    BlockMask(256 x 256, blocks of 64, 10 tiles: 6 full + 4 partial (1 distinct), density 50.2 %)

    Args:
        mask_mod: `mask_mod(b, h, q_idx, kv_idx)`. It is evaluated now: later changes of what it reads are not seen.
        B, H: the attention's numbers of batch elements and query heads; 1 or None: one mask for all. If `mask_mod`
            depends on b, B must be the attention's number; if it depends on h, H must be.
        Q_LEN, KV_LEN: tokens.
        device: by default the GPU, if there is one.
        BLOCK_SIZE: tokens per tile, or two numbers. Powers of two from 16 to 256 are taken as they are, others as the
            next smaller one, or 16: scores stay the same.
        _compile, separate_full_blocks, compute_dq_write_order, dq_kv_order: choices for FlexAttention's kernels, which
            change no mask here.

    Equal to `BlockMask.from_function(mask_mod, Q_LEN, KV_LEN, batch=B or 1, heads=H or 1, ...)`. Raises ValueError if B
    or H is None and `mask_mod` depends on it.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # In compiled code, too, the mask is made anew at every call, because rules often read tensors.
    make = torch.compiler.disable(_created) if torch.compiler.is_dynamo_compiling() else _created
    return make(mask_mod, (B, H), (Q_LEN, KV_LEN), BLOCK_SIZE, device)


def _created(
    mask_mod: Callable[..., Tensor], numbers: tuple[int | None, int | None], lengths: tuple[int, int], block: Block,
    device: torch.device | str,
) -> BlockMask:  # fmt: skip
    read = [False, False]

    def noted(*places: Any) -> Tensor:
        answer = mask_mod(*places)
        read[:] = [one or (isinstance(x, Number) and x.is_read) for one, x in zip(read, places)]
        return answer

    rule = wraps(mask_mod)(noted) if callable(mask_mod) else mask_mod
    batch, heads = (1 if n is None else n for n in numbers)
    size: Any = tuple(map(supported, block)) if isinstance(block, tuple | list) else supported(block)
    mask = BlockMask.from_function(rule, *lengths, batch=batch, heads=heads, block=size, device=device)
    for is_read, given, (what, name) in zip(read, numbers, _NUMBERS):
        if is_read and given is None:
            raise ValueError(
                f"{name} must be the attention's number of {what}s, because mask_mod depends on the {what}; got None."
            )
    of_one = [is_read and n == 1 for is_read, n in zip(read, numbers)]
    mask.pattern._sparseflash_of_one = of_one  # type: ignore[attr-defined]
    return mask


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor,
    score_mod: Callable[..., Tensor] | Scores | Change | None = None,
    block_mask: BlockMask | FlexBlockMask | None = None, scale: float | None = None, enable_gqa: bool = False,
    return_lse: bool = False, kernel_options: Any = None, *, return_aux: AuxRequest | None = None,
    backend: Backend | None = None,
) -> Any:  # fmt: skip
    """`flex_attention` of PyTorch, computed by `attention`.

    >>> q, k, v = torch.randn(3, 1, 2, 256, 16)
    >>> causal = create_block_mask(lambda b, h, q, k: k <= q, None, None, 256, 256, device="cpu")
    >>> flex_attention(q, k, v, lambda score, b, h, q, k: score - 0.1 * (q - k), causal).shape
    torch.Size([1, 2, 256, 16])

    Args:
        query, key, value: `[B, Hq, Nq, D]`, `[B, Hkv, Nk, D]` and `[B, Hkv, Nk, Dv]`.
        score_mod: `score_mod(score, b, h, q_idx, kv_idx)`, which is recognised at every call as by
            `from_score_mod`, and under a causal `block_mask` also ALiBi written as `slopes[h] * (kv_idx - q_idx)`,
            unless the mask is dynamic; or a result of `from_score_mod`, or `sparseflash.scores`, which is faster.
        block_mask: a `BlockMask` of this library, or one of FlexAttention, which is converted (`from_flex`) at its
            first use, and again if its lists, its `mask_mod`, or numbers or tensors that this reads have changed.
        enable_gqa: allows Hkv to be a divisor of Hq.
        return_lse: also return lse `[B, Hq, Nq]`. return_aux: return `(out, AuxOutput)`; `max_scores` is refused.
        scale, backend: as for `attention`. kernel_options: choices for FlexAttention's kernels, which change no result
            here: tile sizes follow from the GPU and the mask.
    """
    for name in kernel_options or ():
        if name.removeprefix("fwd_").removeprefix("bwd_") not in _KERNEL_CHOICES:
            known = ", ".join(_KERNEL_CHOICES)
            raise ValueError(f"kernel_options must be of {known}, for both ways or with fwd_ or bwd_; got {name!r}.")
    refuse_unless(
        return_aux is None or not (return_lse or return_aux.max_scores), "return_aux",
        "AuxRequest(lse=True), without return_lse and max_scores", return_aux,
    )  # fmt: skip
    for name, x in (("query", query), ("key", key), ("value", value)):
        if dense_tensor(x, name).ndim != 4:
            raise ValueError(f"{name} must have shape [batch, heads, tokens, head dim]; got {list(x.shape)}.")
    if not flag(enable_gqa, "enable_gqa") and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query must have as many heads as key unless enable_gqa=True; got {query.shape[1]} and {key.shape[1]}."
        )
    batch, heads, q_len = query.shape[:3]
    if batch > 1 and key.shape[0] == value.shape[0] == 1:
        key, value = key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)
    mask = _mask(block_mask, batch, heads)
    changes: Scores | Change | None = None
    if isinstance(score_mod, Scores | Change):
        changes = score_mod
    elif score_mod is not None:
        changes = changes_of(score_mod, (q_len, key.shape[2]), query.device, lambda: _is_causal(mask))
    out, lse = attention(query, key, value, mask, scale=scale, return_lse=True, scores=changes, backend=backend)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _is_causal(mask: BlockMask | None) -> bool:
    is_known = torch.compiler.disable(_is_known_causal) if torch.compiler.is_dynamo_compiling() else _is_known_causal
    return mask is not None and is_known(mask)


def _is_known_causal(mask: BlockMask) -> bool:
    # The host must not wait for the contents of a dynamic mask, which is made anew at every step.
    return is_countable(mask.indices) and is_causal(mask)


def _mask(block_mask: Any, batch: int, heads: int) -> BlockMask | None:
    if block_mask is None:
        return None
    if isinstance(block_mask, BlockMask):
        of_one = getattr(block_mask.pattern, "_sparseflash_of_one", (False, False))
        for is_of_one, n, (what, name) in zip(of_one, (batch, heads), _NUMBERS):
            if is_of_one and n > 1:
                raise ValueError(
                    f"block_mask must be made by create_block_mask with {name}={n}, the attention's number of {what}s, "
                    f"because its mask_mod depends on the {what}; it was made with 1."
                )
        return block_mask
    convert = torch.compiler.disable(_of_theirs) if torch.compiler.is_dynamo_compiling() else _of_theirs
    return convert(block_mask, batch, heads)


def _of_theirs(block_mask: Any, batch: int, heads: int) -> BlockMask:
    parts = getattr(block_mask, "__dict__", ())
    key = id(block_mask), batch, heads
    found = _converted.get(key)
    if found is None or not found[0].is_still(Captured(parts)):
        mask = from_flex(block_mask, batch=batch, heads=heads)
        # Kept with what it was made of, so that the ids stay its own.
        found = _converted.put(key, (Captured(parts), mask, block_mask))
    made: BlockMask = found[1]
    return made
