"""The candidates of `select_blocks`."""

from __future__ import annotations

from typing import NamedTuple


class Columns(NamedTuple):
    """What the candidates of a choice are made of: columns of the scores, and rows."""

    rows: int  # rows of the scores that choose together
    row_tokens: int  # queries of a row
    span: int  # columns of a block
    column_tokens: int  # keys of a column
    q_len: int
    k_len: int
    causal: bool
    sinks: int
    near: int  # local_blocks

    @property
    def lists(self) -> int:
        return -(-self.q_len // (self.rows * self.row_tokens))

    @property
    def blocks(self) -> int:
        return -(-self.k_len // (self.span * self.column_tokens))


class Pool(NamedTuple):
    """Blocks whose weight is a sum of weights of compressed keys (NSA's eq. 9).

    Block i takes the keys from `parts * i - pieces + 1` to before `parts * (i + 1)`: each as often as pieces of its
    block of tokens lie in block i, so `min(o + 1, parts, pieces, parts + pieces - 1 - o)` times the o-th of them.
    """

    blocks: int
    parts: int
    pieces: int
