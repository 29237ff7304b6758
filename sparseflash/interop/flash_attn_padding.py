"""FlashAttention's functions between padded and packed sequences, of its `flash_attn.bert_padding`."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash.blockmask.arguments import dense_tensor


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of padded sequences, one behind the other, and what `flash_attn_varlen_func` asks for.

    >>> x, mask = torch.arange(6.0).view(2, 3, 1), torch.tensor([[1, 1, 0], [1, 1, 1]])
    >>> packed, indices, cu_seqlens, longest, used = unpad_input(x, mask)
    >>> packed.flatten().tolist(), cu_seqlens.tolist(), longest
    ([0.0, 1.0, 3.0, 4.0, 5.0], [0, 2, 5], 3)
    >>> pad_input(packed, indices, 2, 3).flatten().tolist()
    [0.0, 1.0, 0.0, 3.0, 4.0, 5.0]

    Args:
        hidden_states: `[B, N, ...]`.
        attention_mask: bools or integers `[B, N]`, 1 where a token is valid.
        unused_mask: 1 for other tokens that keep their place among the packed ones, `[B, N]`.

    Returns:
        The tokens `[total, ...]`; their places in the flattened sequences, int64 `[total]`; the running sums of the
        lengths, int32 `[B + 1]`; the longest length; the valid tokens of each sequence, int32 `[B]`.

    The host waits for the device.
    """
    if dense_tensor(attention_mask, "attention_mask").shape != dense_tensor(hidden_states, "hidden_states").shape[:2]:
        raise ValueError(
            f"attention_mask must have shape [B, N], here {list(hidden_states.shape[:2])}; got "
            f"{list(attention_mask.shape)}."
        )
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    sums = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    used = attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, sums, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: `[total, ...]` as `[batch, seqlen, ...]`, with zeros where there is no token.

    >>> pad_input(torch.ones(2, 1), torch.tensor([0, 3]), 2, 2).flatten().tolist()
    [1.0, 0.0, 0.0, 1.0]
    """
    room = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    padded: Tensor = room.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
    return padded


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """`x[indices]`, differentiable.

    >>> index_first_axis(torch.tensor([5.0, 6.0]), torch.tensor([1])).tolist()
    [6.0]
    """
    return x.index_select(0, indices)
