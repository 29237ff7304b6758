"""The arguments of every backend besides q, k and v: the mask's arrays, the scale, the dropout."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.dropout import Dropout


class Problem(NamedTuple):
    """Arguments besides q, k and v.

    >>> Problem.of(None, scale=0.125).block_q
    128

    The arrays are the fields of a `BlockMask` of the same names; all are None for dense attention.
    """

    indptr: Tensor | None
    indices: Tensor | None
    tile: Tensor | None
    words: Tensor | None  # `BlockMask.words`
    pattern: Tensor | None
    lengths: Tensor | None  # int32 [2, B]: live queries and live keys
    block_q: int
    block_k: int
    scale: float
    seed: Tensor | None = None  # of the dropout, one int64; None: no dropout
    dropped: int = 0  # out of 256 weights
    kernels: str = ""  # the kernels of the Triton backend that must be used; "" lets it choose
    dropout_rows: Tensor | None = None  # global coordinates of the weights, for a part of a problem: see `Dropout`
    dropout_queries: Tensor | None = None
    dropout_groups: Tensor | None = None

    @classmethod
    def of(
        cls, mask: BlockMask | None, *, scale: float, batch: int = 1, dropout: Dropout | None = None, kernels: str = ""
    ) -> Problem:
        """The problem of a mask. Shared lengths are expanded to `batch`, the batch size of q."""
        # No `_replace`: torch.compile of PyTorch 2.11 loses its result where `scores.function` breaks the graph.
        dropped: dict[str, Any] = {}
        if dropout is not None:
            dropped = {
                "seed": dropout.seed, "dropped": dropout.dropped, "dropout_rows": dropout.rows,
                "dropout_queries": dropout.queries, "dropout_groups": dropout.groups,
            }  # fmt: skip
        if mask is None:
            return cls(None, None, None, None, None, None, DENSE_BLOCK, DENSE_BLOCK, scale, kernels=kernels, **dropped)
        lengths = mask.lengths
        if lengths is not None and lengths.shape[1] != batch:
            lengths = lengths.expand(2, batch).contiguous()
        return cls(
            mask.indptr, mask.indices, mask.tile, mask.words, mask.pattern, lengths, mask.block_q, mask.block_k,
            scale, kernels=kernels, **dropped,
        )  # fmt: skip

    @property
    def dropout(self) -> Dropout | None:
        if self.seed is None:
            return None
        return Dropout(self.seed, self.dropped, self.dropout_rows, self.dropout_queries, self.dropout_groups)


DENSE_BLOCK = 128  # tokens per tile without a mask

_TYPES = {
    "block_q": "SymInt", "block_k": "SymInt", "scale": "float", "seed": "Tensor?", "dropped": "int", "kernels": "str",
}  # fmt: skip


def schema(*, with_defaults: bool = True) -> str:
    """The arguments of a `Problem` in an operator's schema.

    >>> schema()  # doctest: +ELLIPSIS
    'Tensor? indptr, ..., float scale, Tensor? seed=None, int dropped=0, str kernels="", ...'
    """
    defaults = {name: '""' if value == "" else value for name, value in Problem._field_defaults.items()}
    return ", ".join(
        f"{_TYPES.get(name, 'Tensor?')} {name}" + (f"={defaults[name]}" if with_defaults and name in defaults else "")
        for name in Problem._fields
    )
