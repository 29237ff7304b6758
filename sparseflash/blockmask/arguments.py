"""Validation and conversion of arguments: blocks, lengths, integers and lists of them, boolean tensors, masks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from sparseflash.limits import check_tokens

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask

BLOCKS = (16, 32, 64, 128, 256)
Block = int | tuple[int, int]
Integers = Tensor | NDArray[np.integer[Any]] | Sequence[int]


def block_pair(block: Block) -> tuple[int, int]:
    """Normalises `block` to `(block_q, block_k)`."""
    pair = block if isinstance(block, tuple) else (block, block)
    if len(pair) != 2 or any(not _is_index(b) or operator.index(b) not in BLOCKS for b in pair):
        raise ValueError(
            f"block must be one of {', '.join(map(str, BLOCKS))}, or a tuple of two of them; got {block!r}."
        )
    return int(pair[0]), int(pair[1])


def token_counts(q_len: int, k_len: int) -> tuple[int, int]:
    """Checks the two lengths and returns them as plain ints."""
    q_len, k_len = integer(q_len, "q_len", "tokens"), integer(k_len, "k_len", "tokens")
    for name, value in (("q_len", q_len), ("k_len", k_len)):
        check_tokens(value, name)
    return q_len, k_len


def integer(value: Any, name: str, unit: str) -> int:
    """A Python, NumPy or PyTorch integer as an int. `unit`: a plural for the message, or ""."""
    # int first: the check for tensors takes longer than everything else here.
    if not isinstance(value, int) and isinstance(value, Tensor | np.ndarray) and value.ndim > 0:
        raise TypeError(
            f"{name} must be one integer{f' number of {unit}' if unit else ''}; got a {described(value)} of shape "
            f"{list(value.shape)}. To give each batch element its own mask, build them all and combine them with "
            "masks.per_batch."
        )
    if isinstance(value, bool) or not _is_index(value):
        raise TypeError(f"{name} must be an integer{f' number of {unit}' if unit else ''}; got {value!r}.")
    return operator.index(value)


def alternatives(counts: Sequence[int], what: str) -> str:
    """The different numbers among these, with the noun, for the message of an error.

    >>> alternatives((1, 2, 4), "head"), alternatives((1, 1), "head")
    ('1, 2 or 4 heads', '1 head')
    """
    *others, last = dict.fromkeys(counts)
    numbers = f"{', '.join(map(str, others))} or {last}" if others else str(last)
    return f"{numbers} {what}{'s' if others or last != 1 else ''}"


def check_at_least_one(**sizes: Any) -> None:
    """Raises unless the sizes are positive integers; their names are for the message."""
    for name, size in sizes.items():
        if integer(size, name, "") < 1:
            raise ValueError(f"{name} must be at least 1; got {size}.")


def check_floating(dtype: Any) -> None:
    """Raises TypeError unless this is a dtype of floating-point numbers."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point type; got {dtype!r}.")


def _is_index(value: Any) -> bool:
    # int first: the check of the protocol is slow, and masks that are rebuilt at every step need it a dozen times.
    if isinstance(value, int):
        return True
    if isinstance(value, np.ndarray):  # arrays and tensors have __index__, but it works for single integers only
        return value.ndim == 0 and value.dtype.kind in "iu"
    if isinstance(value, Tensor):
        return value.ndim == 0 and has_integers(value) and value.device.type != "meta"
    return isinstance(value, SupportsIndex)


def dense_tensor(value: Any, name: str) -> Tensor:
    """Returns `value` if it is a dense tensor, raises TypeError otherwise."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor; got {described(value)}.")
    if value.is_nested:
        raise TypeError(
            f"{name} must be a plain tensor; got a nested one. Use attention_varlen, which takes nested tensors, or "
            "pad the sequences and use mask.with_lengths(lengths)."
        )
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor; got one with the layout {value.layout}. Call .to_dense().")
    return value


def have_contents(*tensors: Tensor) -> bool:
    """Whether tensors have contents, unlike on the meta device and under FakeTensorMode."""
    return not any(x.is_meta or isinstance(x, FakeTensor) for x in tensors)


def plain_tensor(value: Any, name: str) -> Tensor:
    """Returns `value` if it is a dense tensor with contents, raises otherwise."""
    tensor = dense_tensor(value, name)
    if tensor.device.type == "meta":
        raise ValueError(f"{name} must lie on a device that holds its contents; got the meta device, which has none.")
    if isinstance(tensor, FakeTensor):
        raise ValueError(
            f"{name} must have contents; got a fake tensor, of torch.export or FakeTensorMode. Build masks outside."
        )
    return tensor


def checked_device(device: Any) -> torch.device:
    """The `torch.device` of a device or its name."""
    if not isinstance(device, torch.device | str):
        raise TypeError(f"device must be a torch.device or its name, such as 'cuda'; got {device!r}.")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be a torch.device or its name, such as 'cuda'; got {device!r}.") from error


def tensor_of(values: Any) -> Tensor:
    """A tensor unchanged; a list or array as a tensor on the CPU. Raises PyTorch's errors for others."""
    if isinstance(values, np.ndarray):
        # as_tensor refuses negative strides and other byte orders, and warns of read-only arrays.
        values = np.require(values, values.dtype.newbyteorder("="), ("C", "W"))
    return values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")


def integers(values: Any, name: str) -> Tensor:
    """A list, 1-D tensor or 1-D array of integers as an int64 tensor `[E]` on the CPU."""
    if isinstance(values, Tensor):
        plain_tensor(values, name)
    try:
        tensor = tensor_of(values).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a list of integers; got {values!r}.") from error
    if tensor.numel() == 0:
        tensor = tensor.to(torch.int64)  # as_tensor makes an empty list fp32
    if tensor.ndim != 1 or not has_integers(tensor):
        raise TypeError(f"{name} must be a list of integers; got {tensor.dtype} of shape {list(tensor.shape)}.")
    return tensor.to(torch.int64)


def integer_tensor(values: Any, name: str, device: torch.device) -> Tensor:
    """A tensor of integers of any shape as int64, on its own device; a list or array becomes one on `device`."""
    if not isinstance(values, Tensor):
        return integers(values, name).to(device)
    return checked_integers(values, name).to(torch.int64)


def known_integers(values: Any, name: str, device: torch.device) -> Tensor:
    """`integer_tensor`, but refuses a tensor without contents."""
    if isinstance(values, Tensor):
        plain_tensor(values, name)
    return integer_tensor(values, name, device)


def checked_integers(value: Any, name: str) -> Tensor:
    """Returns `value` if it is a tensor of integers, raises TypeError otherwise."""
    if not isinstance(value, Tensor) or not has_integers(value):
        raise TypeError(
            f"{name} must be an integer tensor; got {value.dtype if isinstance(value, Tensor) else described(value)}."
        )
    return value


def has_integers(tensor: Tensor) -> bool:
    """Whether the dtype is an integer type; bool is not."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def flag(value: Any, name: str) -> bool:
    """A Python or NumPy bool as a bool; anything else is refused, rather than used for its truth value."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False; got {value!r}.")
    return bool(value)


def described(value: Any) -> str:
    """The name of a value's type, with its module: other libraries have a class BlockMask, too."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


MADE_FROM = (
    "BlockMask.from_dense takes boolean tensors, interop.from_sdpa tensors of 0 and -inf, BlockMask.from_function "
    "rules of positions, interop.from_flex FlexAttention's masks, masks.per_head and masks.per_batch lists of masks; "
    "a pattern is called with its lengths: masks.causal(q_len)"
)


def checked_mask(value: Any) -> BlockMask:
    """Returns `value` if it is a BlockMask, raises TypeError otherwise."""
    from sparseflash.blockmask import BlockMask

    if not isinstance(value, BlockMask):
        raise TypeError(f"mask must be a sparseflash BlockMask; got {described(value)} ({MADE_FROM}).")
    return value


def boolean(value: Any, name: str) -> Tensor:
    """A tensor or array that must be boolean, as a bool tensor."""
    try:
        tensor = tensor_of(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be boolean (True: live); got {described(value)}.") from error
    if plain_tensor(tensor, name).dtype != torch.bool:
        raise TypeError(
            f"{name} must be boolean (True: live); got {tensor.dtype}. Compare it: x != 0 if zeros are dead, x == 0 if "
            "it is added to the scores and -inf is dead."
        )
    return tensor


def check_block_count(name: str, layout: Tensor, q_len: int, k_len: int, block_q: int, block_k: int) -> None:
    """Raises ValueError unless a block layout has exactly the blocks that the lengths need."""
    want = (-(-q_len // block_q), -(-k_len // block_k))
    if tuple(layout.shape[-2:]) != want:
        raise ValueError(
            f"{name} must have {want[0]} x {want[1]} blocks of {block_q} x {block_k} for {q_len} queries and "
            f"{k_len} keys; got {layout.shape[-2]} x {layout.shape[-1]}."
        )
