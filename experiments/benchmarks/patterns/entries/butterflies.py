from __future__ import annotations

from torch import Tensor

from experiments.benchmarks.patterns.entries.image import sides
from experiments.benchmarks.patterns.entries.pattern import Pattern
from experiments.benchmarks.patterns.entries.sequences import among
from sparseflash import BlockMask, masks


def one_bit(x: Tensor) -> Tensor:
    return (x & (x - 1)) == 0


def one_digit(i: Tensor, j: Tensor, radix: int, count: int) -> Tensor:
    found, stride = i == j, 1
    while stride < count:
        found = found | ((i // (stride * radix) == j // (stride * radix)) & (i % stride == j % stride))
        stride *= radix
    return found


def multiple_of_power(distance: Tensor, radix: int, count: int) -> Tensor:
    found, stride = distance == 0, 1
    while stride < count:
        found = found | ((distance % stride == 0) & (distance >= 0) & (distance < stride * radix))
        stride *= radix
    return found


def every_layer(tokens: int, block: int, causal: bool) -> list[BlockMask]:
    strides = max(1, (-(-tokens // block) - 1).bit_length())
    return [masks.butterfly(tokens, block=block, causal=causal, layer=layer) for layer in range(strides)]


def of_image(q: Tensor, k: Tensor, tokens: int, across: int) -> Tensor:
    width = sides(tokens)[1]
    return one_bit((q // width) ^ (k // width)) & one_bit((q % width // across) ^ (k % width // across))


PATTERNS: list[Pattern] = [
    Pattern(
        "butterfly", "butterfly", "i = j, or i XOR j a power of two", lambda n, block: masks.butterfly(n, block=block),
        lambda h, q, k, n, block: one_bit((q // block) ^ (k // block)),
    ),
    Pattern("butterfly, causal", "butterfly", "i = j and k <= q, or i - j a power of two",
        lambda n, block: masks.butterfly(n, causal=True, block=block),
        lambda h, q, k, n, block: (k <= q) & one_bit((q // block - k // block).clamp(min=0)), causal=True),
    Pattern("butterfly, 3 factors", "butterfly", "i = j, or i XOR j in 1, 2, 4",
        lambda n, block: masks.butterfly(n, factors=3, block=block),
        lambda h, q, k, n, block: one_bit((q // block) ^ (k // block)) & ((q // block) ^ (k // block) < 8)),
    Pattern("butterfly, chosen strides", "butterfly", "i = j, or i XOR j in 1, 8",
        lambda n, block: masks.butterfly(n, strides=[1, 8], block=block),
        lambda h, q, k, n, block: among((q // block) ^ (k // block), (0, 1, 8))),
    Pattern("butterfly, radix 4", "butterfly", "i and j differ in at most one digit, in base 4",
        lambda n, block: masks.butterfly(n, radix=4, block=block),
        lambda h, q, k, n, block: one_digit(q // block, k // block, 4, n // block)),
    Pattern("butterfly, radix 3, causal", "butterfly", "i = j and k <= q, or i - j is 1 or 2 times a power of three",
        lambda n, block: masks.butterfly(n, radix=3, causal=True, block=block),
        lambda h, q, k, n, block: (k <= q) & multiple_of_power(q // block - k // block, 3, n // block), causal=True),
    Pattern("butterfly, global block", "butterfly", "i = j, or i XOR j a power of two, or i = 0 or j = 0",
        lambda n, block: masks.butterfly(n, global_blocks=1, block=block),
        lambda h, q, k, n, block: one_bit((q // block) ^ (k // block)) | (q < block) | (k < block)),
    Pattern(
        "butterfly, staged", "butterfly", "i = j, or i XOR j = 2^layer: here layer 3, and the reach of all in turns",
        lambda n, block: masks.butterfly(n, layer=3, block=block),
        lambda h, q, k, n, block: (q // block == k // block) | ((q // block) ^ (k // block) == 8),
        stack=lambda n, block: every_layer(n, block, causal=False),
    ),
    Pattern("butterfly, staged, causal", "butterfly", "i = j and k <= q, or i - j = 2^layer (as before)",
        lambda n, block: masks.butterfly(n, layer=3, causal=True, block=block),
        lambda h, q, k, n, block: ((q // block == k // block) & (k <= q)) | (q // block - k // block == 8),
        causal=True, stack=lambda n, block: every_layer(n, block, causal=True)),
    Pattern("butterfly_2d", "butterfly", "pixels: XOR of the rows zero or a power of two, and XOR of the columns",
        lambda n, block: masks.butterfly_2d(*sides(n), block=block),
        lambda h, q, k, n, block: of_image(q, k, n, 1)),
    Pattern("butterfly_2d, cells of 1 x 8", "butterfly", "the same on an image whose pixels are eight in a row",
        lambda n, block: masks.butterfly_2d(*sides(n), cell=(1, 8), block=block),
        lambda h, q, k, n, block: of_image(q, k, n, 8)),
]  # fmt: skip
