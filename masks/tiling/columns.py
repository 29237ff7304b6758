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
