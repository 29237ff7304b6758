from __future__ import annotations

from itertools import accumulate, pairwise

from torch import Tensor

from experiments.benchmarks.patterns.entries.pattern import MEDIUM, Pattern
from sparseflash import masks

# Packed documents: these lengths, repeated.
DOCUMENTS = (300, 84, 512, 128)

COLUMNS, DIAGONALS = (0, 1, 2, 3, 100, 357, 640), (*range(32), 128, 300, 517)
OF_HEAD = ((COLUMNS, DIAGONALS), ((0, 1, 2, 3), (*range(64), 256, 512)))


def document_lengths(tokens: int) -> list[int]:
    rounds = -(-tokens // sum(DOCUMENTS))
    ends = [0, *(min(end, tokens) for end in accumulate(DOCUMENTS * rounds))]
    return [end - start for start, end in pairwise(ends)]


def document(x: Tensor) -> Tensor:
    number = x // sum(DOCUMENTS) * len(DOCUMENTS)
    for end in list(accumulate(DOCUMENTS))[:-1]:
        number = number + (x % sum(DOCUMENTS) >= end)
    return number


def among(x: Tensor, numbers: tuple[int, ...]) -> Tensor:
    found = x < 0
    for number in numbers:
        found = found | (x == number)
    return found


def by_head(h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    seen = q < 0
    for head, (columns, diagonals) in enumerate(OF_HEAD):
        seen = seen | ((h == head) & (among(k, columns) | among(q - k, diagonals)))
    return (k <= q) & seen


PATTERNS: list[Pattern] = [
    Pattern("dense", "basic", "every score", lambda n, block: masks.dense(n, block=block),
        lambda h, q, k, n, block: (q >= 0) & (k >= 0), tokens=MEDIUM),
    Pattern("causal", "basic", "k <= q", lambda n, block: masks.causal(n, block=block),
        lambda h, q, k, n, block: k <= q, tokens=MEDIUM, causal=True),
    Pattern("prefix_lm", "basic", "k < 256 or k <= q", lambda n, block: masks.prefix_lm(n, prefix=256, block=block),
        lambda h, q, k, n, block: (k < 256) | (k <= q), tokens=MEDIUM),
    Pattern("documents", "basic", "q and k in one document: 300, 84, 512, 128 tokens, and again",
        lambda n, block: masks.documents(document_lengths(n), block=block),
        lambda h, q, k, n, block: document(q) == document(k)),
    Pattern("documents, causal", "basic", "the same documents, and k <= q",
        lambda n, block: masks.documents(document_lengths(n), causal=True, block=block),
        lambda h, q, k, n, block: (document(q) == document(k)) & (k <= q), causal=True),
    Pattern("chunked", "basic", "q // 256 = k // 256", lambda n, block: masks.chunked(n, chunk=256, block=block),
        lambda h, q, k, n, block: q // 256 == k // 256),
    Pattern("chunked, causal", "basic", "q // 200 = k // 200 and k <= q",
        lambda n, block: masks.chunked(n, chunk=200, causal=True, block=block),
        lambda h, q, k, n, block: (q // 200 == k // 200) & (k <= q), causal=True),
    Pattern("local", "windows", "|q - k| <= 128", lambda n, block: masks.local(n, window=256, block=block),
        lambda h, q, k, n, block: (q - k).abs() <= 128),
    Pattern("local, causal", "windows", "q - 256 < k <= q",
        lambda n, block: masks.local(n, window=256, causal=True, block=block),
        lambda h, q, k, n, block: (k <= q) & (q - k < 256), causal=True),
    Pattern("local, left and right", "windows", "q - 191 <= k <= q + 64",
        lambda n, block: masks.local(n, left=191, right=64, block=block),
        lambda h, q, k, n, block: (q - k <= 191) & (k - q <= 64)),
    Pattern("dilated", "windows", "|q - k| <= 192 and 3 divides q - k",
        lambda n, block: masks.dilated(n, window=129, dilation=3, block=block),
        lambda h, q, k, n, block: ((q - k).abs() <= 192) & ((q - k) % 3 == 0)),
    Pattern("dilated, causal", "windows", "q - 256 < k <= q and 16 divides q - k",
        lambda n, block: masks.dilated(n, window=16, dilation=16, causal=True, block=block),
        lambda h, q, k, n, block: (k <= q) & (q - k < 256) & ((q - k) % 16 == 0), causal=True),
    Pattern("longformer", "windows", "|q - k| <= 64, or q or k is one of the first 16 tokens",
        lambda n, block: masks.longformer(n, window=128, global_tokens=16, block=block),
        lambda h, q, k, n, block: ((q - k).abs() <= 64) | (q < 16) | (k < 16)),
    Pattern("longformer, causal", "windows", "k <= q and (q - 128 < k, or q or k is token 0, 400 or 700)",
        lambda n, block: masks.longformer(n, window=128, global_tokens=[0, 400, 700], causal=True, block=block),
        lambda h, q, k, n, block: (k <= q) & ((q - k < 128) | among(q, (0, 400, 700)) | among(k, (0, 400, 700))),
        causal=True),
    Pattern("streaming", "windows", "k <= q and (q - 192 < k or k < 4)",
        lambda n, block: masks.streaming(n, window=192, sink=4, block=block),
        lambda h, q, k, n, block: (k <= q) & ((q - k < 192) | (k < 4)), causal=True),
    Pattern("a_shape", "windows", "k <= q and (q - k <= 128 or k < 64)",
        lambda n, block: masks.a_shape(n, sink=64, local=128, block=block),
        lambda h, q, k, n, block: (k <= q) & ((q - k <= 128) | (k < 64)), causal=True),
    Pattern("tri_shape", "windows", "k <= q and (q - k <= 128 or k < 64 or q is one of the last 128)",
        lambda n, block: masks.tri_shape(n, sink=64, local=128, last=128, block=block),
        lambda h, q, k, n, block: (k <= q) & ((q - k <= 128) | (k < 64) | (q >= n - 128)), causal=True),
    Pattern("vertical_slash", "windows", "k <= q and (k in 0..3, 100, 357, 640 or q - k in 0..31, 128, 300, 517)",
        lambda n, block: masks.vertical_slash(n, vertical=COLUMNS, slash=DIAGONALS, block=block),
        lambda h, q, k, n, block: (k <= q) & (among(k, COLUMNS) | among(q - k, DIAGONALS)), causal=True),
    Pattern("vertical_slash, per head", "windows", "columns and diagonals of its own for each of two heads",
        lambda n, block: masks.vertical_slash(
            n, vertical=[c for c, _ in OF_HEAD], slash=[d for _, d in OF_HEAD], block=block
        ),
        lambda h, q, k, n, block: by_head(h, q, k), causal=True),
]  # fmt: skip
