"""Methods of `BlockMask` that give the same live scores elsewhere or in another form, and check them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparseflash.blockmask import bitmask
from sparseflash.blockmask.arguments import checked_device
from sparseflash.blockmask.cache import SMALL_MASK, BoundedDict, mask_cache, once
from sparseflash.blockmask.compiling import constant_if_its_mask_is, is_faking
from sparseflash.blockmask.csr import stored_tiles
from sparseflash.blockmask.methods import method
from sparseflash.blockmask.patterns import patterns_of_mask
from sparseflash.blockmask.stats import pattern_count
from sparseflash.blockmask.streams import is_capturing
from sparseflash.blockmask.transfer import to_device
from sparseflash.blockmask.validate import validate as check_invariants

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask

_HOST_BYTES = 1 << 20  # a mask up to this size keeps its host copy when it is moved to a GPU
_SHARING = ["cuda"]  # kinds of devices on which equal masks share their arrays; tests add another
_shared = BoundedDict(64)  # masks without lengths on these devices, by their contents


@constant_if_its_mask_is
@method
def to(mask: BlockMask, device: torch.device | str, *, non_blocking: bool = False) -> BlockMask:
    """The mask on another device; itself if it is already there.

    >>> mask = BlockMask.dense(100)
    >>> mask.to("cpu") is mask
    True

    `non_blocking` is accepted because trainers pass it to `to` of a batch; it changes nothing. A copy to a GPU
    never waits for the kernels in its queue, and a copy to the CPU always waits. Equal masks of up to 128 KiB that are
    moved to a GPU share their arrays there, so a small mask that is made anew at every step is copied and planned once.
    """
    device = checked_device(device)
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    if device == mask.device:
        return mask
    if mask.device.type == "meta":
        raise ValueError(f"mask must have contents to be moved to {device}; it is on the meta device, without any.")
    if not (device.type in _SHARING and mask.device.type == "cpu" and _may_be_shared(mask, device)):
        return _moved(mask, device)
    there = once(_shared, (device, _contents(mask)), lambda: _moved(mask._padded(None), device))
    return there if mask.lengths is None else there._padded(to_device([mask.lengths], device)[0])


def _may_be_shared(mask: BlockMask, device: torch.device) -> bool:
    if mask.dynamic or torch.compiler.is_compiling() or is_faking() or is_capturing(device):
        return False
    return mask.nbytes <= SMALL_MASK


def _contents(mask: BlockMask) -> tuple[Any, ...]:
    """What equal masks have in common, lengths aside. Computed once, so that Python hashes the bytes once."""
    cache = mask_cache(mask.indices)
    found: tuple[Any, ...] | None = cache.get("contents")
    if found is None:
        arrays = mask.indptr, mask.indices, mask.tile, mask.bits, mask.pattern
        found = cache["contents"] = *mask._numbers(), mask.pattern.shape, *[x.numpy().tobytes() for x in arrays]
    return found


def _moved(mask: BlockMask, device: torch.device) -> BlockMask:
    arrays = [a for a in mask._arrays() if a is not None]
    moved: list[Tensor | None] = [*to_device(arrays, device)]
    if mask.lengths is None:
        moved.append(None)
    there = type(mask)(*mask._numbers(), *moved, dynamic=mask.dynamic)  # type: ignore[arg-type]
    if device.type == "cuda" and mask.device.type == "cpu" and mask.nbytes <= _HOST_BYTES and not mask.dynamic:
        mask_cache(there.indices)["host"] = mask._padded(None)
    return there


@method
def canonical(mask: BlockMask) -> BlockMask:
    """The canonical mask with the same live scores; itself unless it is `dynamic`.

    >>> scores = torch.tensor([[0.9, 0.0, 0.0], [0.2, 0.8, 0.0], [0.1, -torch.inf, -torch.inf]])
    >>> from sparseflash import masks
    >>> chosen = masks.top_k_blocks(scores, k=2, q_len=96, block=32, causal=True)
    >>> chosen.indptr.tolist(), chosen.indices.tolist()  # capacity for five tiles; four are used
    ([0, 1, 3, 4], [0, 0, 1, 0, 2])
    >>> chosen.canonical().indices.tolist()
    [0, 0, 1, 0]

    Synchronises with the device. Computed once and cached, also for comparing, hashing and printing a dynamic mask.

    Raises ValueError on the meta device, as does everything that needs the contents: the algebra, `==`, `hash`.
    """
    if mask.device.type == "meta":
        raise ValueError("mask must lie on a device that holds its contents; got the meta device, which has none.")
    if not mask.dynamic:
        return mask
    from sparseflash.blockmask.ops.tilelist import mask_of_patterns

    made = once(
        mask_cache(mask.indices), "canonical",
        lambda: mask_of_patterns(mask, patterns_of_mask(mask), mask.bits, mask.pattern.long(), None),
    )  # fmt: skip
    return made if mask.lengths is None else made._padded(mask.lengths)


@method
def to_dense(mask: BlockMask) -> Tensor:
    """The dense matrix: bool `[B or 1, Hq or 1, q_len, k_len]`, True where a score is live.

    >>> BlockMask.from_function(lambda q, k: k <= q, 3, block=16).to_dense()[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]

    Takes `N x N` memory: for tests and pictures.
    """
    (row_blocks, col_blocks), device, patterns = mask.blocks, mask.device, pattern_count(mask)
    dense = torch.zeros(patterns * row_blocks, col_blocks, mask.block_q, mask.block_k, dtype=torch.bool, device=device)
    rows, cols, tile = stored_tiles(mask)
    dense[rows, cols] = bitmask.unpack(bitmask.choices(mask.bits, mask.block_k), mask.block_k)[tile]
    dense = dense.reshape(patterns, row_blocks, col_blocks, mask.block_q, mask.block_k).transpose(2, 3)
    dense = dense.reshape(patterns, row_blocks * mask.block_q, col_blocks * mask.block_k)
    live = dense[:, : mask.q_len, : mask.k_len][mask.pattern.long()]  # [B or 1, Hq or 1, Nq, Nk]
    if mask.lengths is not None:
        q_stop, k_stop = mask.lengths.view(2, -1, 1, 1, 1)
        live = live & (torch.arange(mask.q_len, device=device).view(-1, 1) < q_stop)
        live = live & (torch.arange(mask.k_len, device=device) < k_stop)
    return live


@method
def to_layout(mask: BlockMask) -> Tensor:
    """Bool `[B or 1, Hq or 1, Mq, Mk]`, True where any score of the tile is live: the input of `from_layout`.

    >>> layout = torch.eye(4, dtype=torch.bool)
    >>> BlockMask.from_layout(layout, block=32).to_layout()[0, 0].equal(layout)
    True
    """
    mask = mask.bake_lengths()
    (row_blocks, col_blocks), patterns = mask.blocks, pattern_count(mask)
    layout = torch.zeros(patterns * row_blocks, col_blocks, dtype=torch.bool, device=mask.device)
    rows, cols, _ = stored_tiles(mask)
    layout[rows, cols] = True
    return layout.view(patterns, row_blocks, col_blocks)[mask.pattern.long()]


@method
def save(mask: BlockMask, path: str | os.PathLike[str]) -> None:
    """Writes the mask to one file: an uncompressed npz (no pickle) with a format version. Equal masks give equal
    bytes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     BlockMask.dense(100).save(f"{folder}/dense.mask")
    ...     BlockMask.load(f"{folder}/dense.mask") == BlockMask.dense(100)
    True

    No extension is added to `path`. The write is atomic (a temporary file in the same folder is renamed), and an
    existing file is replaced. Raises OSError, with the path, if the file cannot be written.
    """
    from sparseflash.blockmask import serialization

    serialization.save(mask.canonical(), path)


@method
def load(cls: type[BlockMask], path: str | os.PathLike[str], *, device: torch.device | str | None = None) -> BlockMask:
    """Reads a mask that `save` wrote and validates all of it: a damaged or malicious file raises an error.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     BlockMask.dense(100).save(f"{folder}/dense.mask")
    ...     BlockMask.load(f"{folder}/dense.mask")
    BlockMask(100 x 100, blocks of 128, 1 tile: 0 full + 1 partial (1 distinct), density 100 %)

    Args:
        path: the file.
        device: the device of the mask; the CPU by default.

    Memory is proportional to the actual size of the file, whatever its headers claim. Raises ValueError if the
    contents are not an intact mask, OSError if the file cannot be read; both name the path.
    """
    from sparseflash.blockmask import serialization

    return serialization.load(path, device=device)


@method
def validate(mask: BlockMask) -> BlockMask:
    """Checks every invariant of the arrays and returns the mask.

    >>> BlockMask.dense(100).validate().density
    1.0

    Takes O(nnz + T) time and synchronises with the device. Raises ValueError naming the first broken invariant. A
    mask from an unknown source that passes is safe to run (no index is out of range) and canonical (so `==` and
    `hash` are meaningful); a dynamic mask that passes is safe to run.
    """
    check_invariants(mask)
    return mask
