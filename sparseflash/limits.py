"""The largest strides and counts that the kernels take.

Kernels compute the start of a tile in 64 bits, and the offsets inside a tile in 32 bits, because 64-bit offsets need
more registers than a thread has. Tiles, work items and tokens are counted in 32 bits.
"""

from __future__ import annotations

from torch import Tensor

COUNT = 2**31  # every count must be below this
MOST_TOKENS = COUNT - 257  # of a sequence: its last tile, of up to 256 tokens, ends below 2^31
FAR = COUNT // 256  # token strides must be below: offsets in a tile, of at most 256 tokens, must fit in 32 bits


def is_near(x: Tensor) -> bool:
    """Whether kernels can read and write `x[b, h, n]`: the last stride is 1, and the token stride is below `FAR`.

    >>> import torch
    >>> x = torch.empty(2, 3, 128, 64, device="meta")
    >>> is_near(x), is_near(x.mT), is_near(x.as_strided(x.shape, (0, 64, FAR, 1)))
    (True, False, False)
    """
    return x.stride(-1) == 1 and (x.stride(-2) < FAR or x.shape[-2] <= 1)


def check_near(x: Tensor, name: str) -> None:
    """Raises ValueError unless `is_near`."""
    if is_near(x):
        return
    if x.stride(-1) != 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension; its strides are {x.stride()}. Call .contiguous()."
        )
    raise ValueError(
        f"tokens of {name} must lie less than {FAR:,} elements apart; its strides are {x.stride()}. Call .contiguous()."
    )


def check_tokens(length: int, name: str) -> None:
    """Raises ValueError unless `length` is a valid number of tokens of a sequence."""
    if not 1 <= length <= MOST_TOKENS:
        raise ValueError(f"{name} must be between 1 and 2^31 - 257 tokens; got {length}.")


def check_count(what: str, *factors: int, remedy: str) -> None:
    """Raises ValueError unless a count, the product of the factors, fits in 32 bits.

    >>> check_count("batch x heads x tiles", 2, 8, 128, remedy="Split the batch.")
    """
    count = 1
    for factor in factors:  # not math.prod, which torch.compile cannot trace for sizes that vary
        count *= factor
    if count >= COUNT:
        raise ValueError(f"{what} must be below 2^31; got {' x '.join(map(str, factors))}. {remedy}")
