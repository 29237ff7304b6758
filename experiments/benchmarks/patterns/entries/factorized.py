from __future__ import annotations

from torch import Tensor

from experiments.benchmarks.patterns.entries.butterflies import one_bit
from experiments.benchmarks.patterns.entries.pattern import MEDIUM, Pattern
from sparseflash import masks

STRIDE = 128  # tokens
CHUNK = 4  # blocks


def of_chunks(h: Tensor, q: Tensor, k: Tensor, *, summary: int, verts: int) -> Tensor:
    end = STRIDE - h % verts * summary
    return (k <= q) & ((q // STRIDE == k // STRIDE) | ((k % STRIDE >= end - summary) & (k % STRIDE < end)))


def far_cell(i: Tensor, j: Tensor, count: int) -> Tensor:
    found, level = (i - j).abs() <= 1, 0
    while count >> level:
        apart = ((i >> level) - (j >> level)).abs() >= 2
        parents_near = ((i >> level + 1) - (j >> level + 1)).abs() <= 1
        is_last = ((j + 1) % (1 << level) == 0) | (j == count - 1)
        found = found | (apart & parents_near & is_last)
        level += 1
    return found


PATTERNS: list[Pattern] = [
    Pattern("strided", "factorized", "k <= q and (q - k < 128 or 128 divides q - k)",
        lambda n, block: masks.strided(n, stride=STRIDE, block=block),
        lambda h, q, k, n, block: (k <= q) & ((q - k < STRIDE) | ((q - k) % STRIDE == 0)), tokens=MEDIUM, causal=True),
    Pattern(
        "strided, far part", "factorized", "k <= q and 128 divides q - k; the reach is with the near part, in turns",
        lambda n, block: masks.strided(n, stride=STRIDE, attend="strided", block=block),
        lambda h, q, k, n, block: (k <= q) & ((q - k) % STRIDE == 0), tokens=MEDIUM, causal=True,
        stack=lambda n, block: [
            masks.strided(n, stride=STRIDE, attend=part, block=block) for part in ("local", "strided")
        ],
    ),
    Pattern("fixed", "factorized", "k <= q and (q // 128 = k // 128 or k % 128 >= 120)",
        lambda n, block: masks.fixed(n, stride=STRIDE, summary=8, block=block),
        lambda h, q, k, n, block: of_chunks(h, q, k, summary=8, verts=1), tokens=MEDIUM, causal=True),
    Pattern("fixed, far part", "factorized", "k <= q and k % 128 >= 120; the reach is with the own chunk, in turns",
        lambda n, block: masks.fixed(n, stride=STRIDE, summary=8, attend="summary", block=block),
        lambda h, q, k, n, block: (k <= q) & (k % STRIDE >= STRIDE - 8), tokens=MEDIUM, causal=True,
        stack=lambda n, block: [
            masks.fixed(n, stride=STRIDE, summary=8, attend=part, block=block) for part in ("local", "summary")
        ]),
    Pattern("fixed, per head", "factorized", "as fixed, with k % 128 >= 112 in head 0, 96..111 in head 1, and so on",
        lambda n, block: masks.fixed(n, stride=STRIDE, summary=16, heads=4, num_verts=4, block=block),
        lambda h, q, k, n, block: of_chunks(h, q, k, summary=16, verts=4), tokens=MEDIUM, causal=True),
    Pattern("deepspeed_fixed", "factorized", "i // 4 = j // 4 or j % 4 = 3",
        lambda n, block: masks.deepspeed_fixed(n, block=block),
        lambda h, q, k, n, block: (q // block // CHUNK == k // block // CHUNK) | (k // block % CHUNK == 3),
        tokens=MEDIUM),
    Pattern("deepspeed_fixed, horizontal", "factorized", "i // 4 = j // 4 or j % 4 = 3 or i % 4 = 3",
        lambda n, block: masks.deepspeed_fixed(n, horizontal=True, block=block),
        lambda h, q, k, n, block: (
            (q // block // CHUNK == k // block // CHUNK) | (k // block % CHUNK == 3) | (q // block % CHUNK == 3)
        ), tokens=MEDIUM),
    Pattern("deepspeed_fixed, causal", "factorized", "k <= q and (i // 4 = j // 4 or j % 4 = 3)",
        lambda n, block: masks.deepspeed_fixed(n, causal=True, block=block),
        lambda h, q, k, n, block: (k <= q) & (
            (q // block // CHUNK == k // block // CHUNK) | (k // block % CHUNK == 3)
        ), tokens=MEDIUM, causal=True),
    Pattern("deepspeed_fixed, per head", "factorized", "i // 4 = j // 4 or j % 4 = 3 - h, for head h of 4",
        lambda n, block: masks.deepspeed_fixed(n, heads=4, global_patterns=4, block=block),
        lambda h, q, k, n, block: (q // block // CHUNK == k // block // CHUNK) | (k // block % CHUNK == 3 - h),
        tokens=MEDIUM),
    Pattern(
        "log_sparse", "factorized", "q - k zero or a power of two", lambda n, block: masks.log_sparse(n, block=block),
        lambda h, q, k, n, block: (k <= q) & one_bit((q - k).clamp(min=0)), causal=True,
    ),
    Pattern("log_sparse, window and restart", "factorized",
        "with d = (q - k) % 512, k <= q: d < 32, or d - 31 a power of two",
        lambda n, block: masks.log_sparse(n, window=32, restart=512, block=block),
        lambda h, q, k, n, block: (k <= q) & one_bit(((q - k) % 512 - 31).clamp(min=0)), tokens=MEDIUM, causal=True),
    Pattern(
        "hierarchical", "factorized", "|i - j| <= 1, or j the last block of a cell of 1, 2, 4, ... in i's far field",
        lambda n, block: masks.hierarchical(n, block=block),
        lambda h, q, k, n, block: far_cell(q // block, k // block, -(-n // block)),
    ),
    Pattern("hierarchical, causal", "factorized", "the same, and k <= q",
        lambda n, block: masks.hierarchical(n, causal=True, block=block),
        lambda h, q, k, n, block: (k <= q) & far_cell(q // block, k // block, -(-n // block)), causal=True),
]  # fmt: skip
