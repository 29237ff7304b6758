"""`BlockMask`: the live scores of an attention, as data.

The block structure in compressed sparse rows (CSR), plus one bit per score for the partly live tiles. This file has the
type, its properties and its comparisons; `methods/` has the methods and their documentation.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from sparseflash.blockmask import bitmask, walks
from sparseflash.blockmask.arguments import checked_mask
from sparseflash.blockmask.build import Part, arrays_of
from sparseflash.blockmask.cache import attach_cache, belong_together, mask_cache, once
from sparseflash.blockmask.csr import columns_of, may_vary_in_size
from sparseflash.blockmask.methods import algebra, construction, conversion, drawing, moves, padding
from sparseflash.blockmask.remedies import no_attribute, refuse
from sparseflash.blockmask.stats import live_tokens
from sparseflash.blockmask.summary import summary
from sparseflash.blockmask.validate import check_arrays

if TYPE_CHECKING:
    from typing import ClassVar


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """The set of live scores of an attention over `q_len` queries and `k_len` keys.

    A window of three keys over 40 tokens in blocks of 16. There are four distinct partial tiles: one on each side of
    the diagonal, one on it, and the ragged last one:

    >>> mask = BlockMask.from_function(lambda q, k: (q - k).abs() <= 1, 40, block=16)
    >>> mask
    BlockMask(40 x 40, blocks of 16, 7 tiles: 0 full + 7 partial (4 distinct), density 7.38 %)
    >>> mask.indptr.tolist(), mask.indices.tolist(), mask.tile.tolist()
    ([0, 2, 5, 7], [0, 1, 0, 1, 2, 1, 2], [1, 2, 3, 1, 2, 3, 4])

    The dense matrix, rebuilt from the arrays in four lines:

    >>> dense = torch.zeros(48, 48, dtype=torch.bool)
    >>> for i in range(3):
    ...     for e in range(mask.indptr[i], mask.indptr[i + 1]):
    ...         j, words = int(mask.indices[e]), mask.bits[mask.tile[e] - 1]  # no tile of this mask is full
    ...         dense[16*i:16*i+16, 16*j:16*j+16] = (words >> torch.arange(16)) & 1 == 1
    >>> torch.equal(dense[:40, :40], mask.to_dense()[0, 0])
    True

    The score matrix is divided into tiles of `block_q x block_k` tokens: `Mq = ceil(q_len / block_q)` rows and `Mk =
    ceil(k_len / block_k)` columns of them. With P distinct patterns, nnz stored tiles and T distinct partial tiles:

    - `indptr`   int32 `[P * Mq + 1]`: the tiles of block row i of pattern p are `indptr[p*Mq + i] : indptr[p*Mq + i+1]`
    - `indices`  int32 `[nnz]`: their block columns, strictly increasing within a row
    - `tile`     int32 `[nnz]`: 0: every score is live; t > 0: the live scores are in `bits[t - 1]`
    - `bits`     int32 `[T, block_q, max(block_k // 32, 1)]`: bit `k % 32` of word `k // 32` of row q is score (q, k)
    - `pattern`  int32 `[B or 1, Hq or 1]`: the pattern of each batch element and query head; a size of 1 is shared
    - `lengths`  int32 `[2, B or 1]` or None: the number of live queries and of live keys of each sequence; tokens past
      them are dead (padding)

    Build a mask with `from_dense`, `from_layout`, `from_function`, `from_tiles`, `from_block_index`, `dense`, or a
    function of `sparseflash.masks`. Call the class itself only with arrays that obey these rules; `validate()` checks
    all of them.

    The arrays are canonical: empty tiles are not stored, full tiles have `tile == 0`, equal partial tiles and equal
    patterns are stored once, in order of first appearance, and ragged ends are partial tiles. So equal masks have equal
    arrays, and `==` and `hash` compare the arrays (`lengths` included), on any device. A mask is immutable: never write
    to its arrays.

    `dynamic`: a mask that is built on the GPU at every step cannot be canonical, because counting its tiles would
    synchronise with the device. Its arrays are safe to run but not canonical (see `blockmask/validate.py`);
    `canonical()` returns the equivalent canonical mask.
    """

    q_len: int
    k_len: int
    block_q: int
    block_k: int
    indptr: Tensor
    indices: Tensor
    tile: Tensor
    bits: Tensor
    pattern: Tensor
    lengths: Tensor | None = None
    dynamic: bool = field(default=False, kw_only=True)
    if TYPE_CHECKING:
        words: ClassVar[Tensor]  # an instance attribute that is not a field; see `_words`

    from_function = classmethod(construction.from_function)
    from_dense = classmethod(construction.from_dense)
    from_layout = classmethod(construction.from_layout)
    from_tiles = classmethod(construction.from_tiles)
    from_block_index = classmethod(construction.from_block_index)
    dense = classmethod(construction.dense)

    __and__ = algebra.__and__
    __or__ = algebra.__or__
    __xor__ = algebra.__xor__
    __sub__ = algebra.__sub__
    __invert__ = algebra.__invert__
    __add__ = __radd__ = __mul__ = __rmul__ = algebra.__add__

    reblock = moves.reblock
    crop = moves.crop
    select = moves.select
    permute = moves.permute
    transpose = moves.transpose

    with_lengths = padding.with_lengths
    bake_lengths = padding.bake_lengths

    to = conversion.to
    canonical = conversion.canonical
    to_dense = conversion.to_dense
    to_layout = conversion.to_layout
    save = conversion.save
    load = classmethod(conversion.load)
    validate = conversion.validate

    to_string = drawing.to_string
    plot = drawing.plot
    _repr_html_ = drawing._repr_html_

    def __post_init__(self) -> None:
        check_arrays(self)
        object.__setattr__(self, "words", self._words())
        if belong_together(self.indices, self._others()):
            return
        # Everything derived from the arrays is cached on the indices tensor. Masks that share indices may differ in
        # other arrays, so each mask has its own tensor object over the same memory.
        object.__setattr__(self, "indices", self.indices.detach())
        self._made()

    def _made(self) -> None:
        for array in (self.indptr, self.indices, self.tile, self.words):
            may_vary_in_size(array)
        attach_cache(self.indices, may_wait=not self.dynamic, others=self._others())

    def _words(self) -> Tensor:
        """The bits as the operator takes them: one flat view, int32 `[T * block_q * W]`.

        If no tile is partial it is one dead tile, because torch.compile would specialise on a size of 0. It is not a
        field, because FSDP rebuilds a mask from its fields, and this one is derived from `bits`.
        """
        if self.bits.shape[0] > 0:
            return self.bits.view(-1)
        return self.bits.new_zeros(self.block_q * bitmask.words_per_row(self.block_k))

    @property
    def q_lengths(self) -> Tensor | None:
        """The number of live queries of each sequence, int32 `[B or 1]`; None if there is no padding.

        >>> BlockMask.dense(3, 5, block=16).with_lengths(k_lengths=[4, 2]).q_lengths.tolist()
        [3, 3]
        """
        return None if self.lengths is None else self.lengths[0]

    @property
    def k_lengths(self) -> Tensor | None:
        """The number of live keys of each sequence, int32 `[B or 1]`; None if there is no padding.

        >>> BlockMask.dense(3, 5, block=16).with_lengths(k_lengths=[4, 2]).k_lengths.tolist()
        [4, 2]
        """
        return None if self.lengths is None else self.lengths[1]

    def _padded(self, lengths: Tensor | None) -> BlockMask:
        """The same mask and cache with these lengths, int32 `[2, B]` or None.

        Bypasses the constructor: its checks have been made, and repeating them would dominate the cost at every step.
        """
        mask = object.__new__(BlockMask)
        for name in (*_FIELDS, "words"):
            object.__setattr__(mask, name, getattr(self, name))
        object.__setattr__(mask, "lengths", lengths)
        return mask

    @classmethod
    def _chosen(
        cls, numbers: tuple[int, int, int, int], indptr: Tensor, indices: Tensor, tile: Tensor, bits: Tensor,
        pattern: Tensor,
    ) -> BlockMask:  # fmt: skip
        """A dynamic mask of arrays that obey the rules, with indices that no other mask has.

        Bypasses the constructor, as `_padded` does.
        """
        mask = object.__new__(cls)
        vars(mask).update(zip(_FIELDS, (*numbers, indptr, indices, tile, bits, pattern, None, True), strict=True))
        object.__setattr__(mask, "words", mask._words())
        mask._made()
        return mask

    @classmethod
    def _of(
        cls, q_len: int, k_len: int, block_q: int, block_k: int, parts: list[Part], numbers: Tensor | None = None
    ) -> BlockMask:
        return cls(q_len, k_len, block_q, block_k, *arrays_of(q_len, k_len, block_q, block_k, parts, numbers))

    # properties and comparison

    @property
    def device(self) -> torch.device:
        """The device of the arrays.

        >>> BlockMask.dense(100).device
        device(type='cpu')
        """
        return self.indices.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(B or 1, Hq or 1, q_len, k_len)`: the shape of `to_dense()`.

        >>> BlockMask.dense(100, 60).with_lengths([10, 20]).shape
        (2, 1, 100, 60)
        """
        batch = self.pattern.shape[0] if self.lengths is None else self.lengths.shape[1]
        return batch, self.pattern.shape[1], self.q_len, self.k_len

    @property
    def blocks(self) -> tuple[int, int]:
        """`(Mq, Mk)`: the number of block rows and of block columns.

        >>> BlockMask.dense(100, 60, block=32).blocks
        (4, 2)
        """
        return -(-self.q_len // self.block_q), -(-self.k_len // self.block_k)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, without cached data such as the transpose and plans.

        >>> BlockMask.from_function(lambda q, k: k <= q, 256, block=64).nbytes  # 5 + 10 + 10 + 128 + 1 int32 numbers
        616
        """
        return sum(a.numel() * a.element_size() for a in self._arrays() if a is not None)

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """The transpose: `(indptr [P * Mk + 1], indices [nnz], tile [nnz])` of the block columns, all int32.

        >>> indptr, indices, tile = BlockMask.from_function(lambda q, k: k <= q, 48, block=16).columns
        >>> indptr.tolist(), indices.tolist(), tile.tolist()
        ([0, 3, 5, 6], [0, 1, 2, 1, 2, 2], [1, 0, 0, 1, 0, 1])

        The tiles themselves are not transposed: `bits[tile - 1]` still has queries as rows. Computed once and cached.
        For a dynamic mask the arrays also have unused capacity.
        """
        return columns_of(self.indptr, self.indices, self.tile, *self.blocks)

    @property
    def T(self) -> BlockMask:
        """`transpose()`: the mask with queries and keys exchanged.

        >>> BlockMask.dense(100, 60, block=16).T.shape
        (1, 1, 60, 100)
        """
        return self.transpose()

    @property
    def density(self) -> float:
        """The share of live scores, averaged over heads and batch elements (1.0 for dense); padding counts as dead.

        >>> BlockMask.dense(100).with_lengths([50]).density
        0.25
        """
        if self.lengths is not None:  # the cache is shared by masks that differ only in their lengths
            return walks.live_scores(self) / (self.q_len * self.k_len)
        cache = mask_cache(self.indices)
        if "density" not in cache:
            cache["density"] = walks.live_scores(self) / (self.q_len * self.k_len)
        return float(cache["density"])

    def __repr__(self) -> str:
        return summary(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockMask):
            return NotImplemented
        if self is other:
            return True
        if self._numbers() != other._numbers():
            return False
        mine, theirs = self.canonical()._arrays(), other.canonical()._arrays()
        return all(
            (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b.to(a.device)))
            for a, b in zip(mine, theirs, strict=True)
        )

    def __bool__(self) -> NoReturn:
        # Without this every mask is true, so `near and far` would silently be `far`.
        raise TypeError(
            "masks must be combined by &, | and ~; got one where Python needs True or False (and, or, not, if). Write "
            "mask is not None to ask whether there is one, mask.density > 0 whether anything is live."
        )

    if not TYPE_CHECKING:  # a type checker would accept any attribute of a class with this method

        def __getattr__(self, name: str) -> Any:
            own = vars(self)
            if (make := own.get("_make")) is not None:  # computed when it is first read: recorded.py
                own.update(vars(make()), _make=None)  # only now: making may fail, and another thread may read the mask
            if name not in own:
                raise no_attribute(name)
            return own[name]

    def __getitem__(self, index: object) -> NoReturn:
        # Iteration calls this, too. __iter__ would make a mask an Iterable, which stands for several masks elsewhere.
        refuse("index")

    def __len__(self) -> NoReturn:
        refuse("len")

    def __array__(self, *_: object, **__: object) -> NoReturn:
        # Without this, NumPy would make an object array that holds the mask.
        refuse("array")

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        # What NumPy asks of any argument, and can be answered without the dense matrix.
        if function not in (np.shape, np.size, np.ndim):
            refuse("array")
        dense = np.broadcast_to(False, self.shape)  # one bool
        named = {name: dense if x is self else x for name, x in kwargs.items()}
        return function(*(dense if x is self else x for x in args), **named)

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of the contents: equal for equal masks, on any device and in any process.

        >>> from sparseflash import masks
        >>> masks.causal(100, block=32).digest == BlockMask.from_function(lambda q, k: k <= q, 100, block=32).digest
        True

        Use it to compare masks of several processes, or to name files; `hash` differs between processes. Takes
        O(nnz + T) time once; synchronises with the device.
        """
        if self.canonical() is not self:
            return self.canonical().digest
        cache = mask_cache(self.indices)
        if "digest" not in cache:
            digest = hashlib.blake2b(digest_size=8)
            for array in (self.indptr, self.indices, self.tile, self.bits, self.pattern):
                digest.update(repr(tuple(array.shape)).encode())
                digest.update(array.cpu().numpy().tobytes())
            cache["digest"] = digest.digest()
        lengths = None if self.lengths is None else tuple(live_tokens(self))
        others = repr((self._numbers(), lengths)).encode()
        return hashlib.blake2b(others, key=cache["digest"], digest_size=8).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def _others(self) -> tuple[Any, ...]:
        return *self._numbers(), self.dynamic, self.indptr, self.tile, self.bits, self.pattern

    def _numbers(self) -> tuple[int, int, int, int]:
        return self.q_len, self.k_len, self.block_q, self.block_k

    def _arrays(self) -> tuple[Tensor | None, ...]:
        return self.indptr, self.indices, self.tile, self.bits, self.pattern, self.lengths

    def __copy__(self) -> BlockMask:
        return self  # immutable

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockMask:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Leaves out the cache and the unused capacity of a dynamic mask. Each array is pickled in memory that lives
        # as long as the mask: PyTorch passes tensors to a child process as file descriptors, and a temporary copy's
        # would be closed by then.
        mask = self.canonical() if self.dynamic else self
        arrays = tuple(None if a is None else _alone(mask.indices, a) for a in mask._arrays())
        return BlockMask, (*self._numbers(), *arrays)

    def __rand__(self, other: object) -> BlockMask:
        return checked_mask(other)  # raises: Python calls this only if the left operand is not a mask

    __ror__ = __rxor__ = __rsub__ = __rand__
    __array_ufunc__ = None


_FIELDS = tuple(each.name for each in fields(BlockMask))


def _alone(indices: Tensor, array: Tensor) -> Tensor:
    if array.untyped_storage().nbytes() == array.numel() * array.element_size():
        return array.detach()
    # The cache entry holds the array's memory, so that no other tensor can have the same address and thus the same key.
    # It must not hold the array itself, which may be the indices tensor that owns the cache: the cycle would never be
    # freed.
    key = ("alone", array.data_ptr(), array.shape, array.stride())
    _, copy = once(mask_cache(indices), key, lambda: (array.detach(), array.clone()))
    return copy.detach()
