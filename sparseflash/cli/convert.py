"""Writes masks in the formats of other libraries, and reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from sparseflash import BlockMask, interop
from sparseflash.cli import archives
from sparseflash.cli.names import FORMATS as NAMES
from sparseflash.cli.names import STORED, SUFFIXES

_KIND = "sparseflash.convert"
_OF_LISTS = ("num_blocks", "indices")
Fields = dict[str, Any]


class Format(NamedTuple):
    """The conversion of a library's mask to tensors and numbers by name, and back."""

    fields: Callable[[BlockMask], Fields]
    mask: Callable[[Fields, tuple[int, int]], BlockMask]  # of fields and the block


def _fa4(mask: BlockMask) -> Fields:
    if bool((mask.tile != 0).any()):
        raise ValueError(
            "--to fa4 must be given a mask of whole tiles, as FA4 takes others for full without a mask_mod; "
            f"got {mask!r}. In Python: interop.to_fa4(mask, partial=True), and a mask_mod for FA4"
        )
    found = interop.to_fa4(mask)
    return {"forward": found.forward._asdict(), "backward": found.backward._asdict()} | _lengths(mask)


def _of_fa4(fields: Fields, block: tuple[int, int]) -> BlockMask:
    lists = interop.BlockSparseTensors(**fields["forward"])
    return interop.from_fa4(lists, fields["q_len"], fields["k_len"])


_LISTS = tuple(f"{prefix}{side}_{what}" for side in ("kv", "q") for prefix in ("", "full_") for what in _OF_LISTS)


def _flex(mask: BlockMask) -> Fields:
    from sparseflash.interop.lookup import tile_lookup

    found = interop.to_flex(mask)
    lists = {name: getattr(found, name) for name in _LISTS}
    numbers = {"seq_lengths": list(found.seq_lengths), "BLOCK_SIZE": list(found.BLOCK_SIZE)}
    return lists | numbers | {"lookup": tile_lookup(mask)._asdict()}


def _of_flex(fields: Fields, block: tuple[int, int]) -> BlockMask:
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

    from sparseflash.interop.lookup import mask_mod

    rest = dict(fields)
    lookup, size = interop.TileLookup(**rest.pop("lookup")), tuple(rest.pop("BLOCK_SIZE"))
    lengths = tuple(rest.pop("seq_lengths"))
    found = FlexBlockMask(seq_lengths=lengths, BLOCK_SIZE=size, mask_mod=mask_mod(lookup, *size), **rest)
    return interop.from_flex(found)


def _lengths(mask: BlockMask) -> Fields:
    return {"q_len": mask.q_len, "k_len": mask.k_len}


_FORMATS = {
    "sdpa": Format(
        lambda mask: {"attn_mask": interop.to_sdpa(mask)},
        lambda fields, block: interop.from_sdpa(fields["attn_mask"], block=block),
    ),
    "torch-sparse": Format(
        lambda mask: {"matrix": interop.to_torch_sparse(mask)},
        lambda fields, block: interop.from_torch_sparse(fields["matrix"], block=block),
    ),
    "flex": Format(_flex, _of_flex),
    "fa4": Format(_fa4, _of_fa4),
    "flashinfer": Format(
        lambda mask: interop.to_flashinfer(mask)._asdict(),
        lambda fields, block: interop.from_flashinfer(**fields, block=block),
    ),
    "flashmask": Format(
        lambda mask: interop.to_flashmask(mask)._asdict() | _lengths(mask),
        lambda fields, block: interop.from_flashmask(
            fields["startend_row_indices"], causal=fields["causal"], q_len=fields["q_len"], block=block
        ),
    ),
    "deepspeed": Format(
        lambda mask: interop.to_deepspeed(mask)._asdict(),
        lambda fields, block: interop.from_deepspeed(fields["layout"], fields["block"]),
    ),
}
FORMATS = {name: _FORMATS[name] for name in STORED}  # a name without a format is an error at once


def format_of(path: Path, asked: str | None) -> str:
    """The format of a file to be written: the one that was asked for, or the one that the file's name implies."""
    by_name = SUFFIXES.get(path.suffix)
    if asked is not None and asked not in NAMES:
        raise ValueError(f"--to must be of {', '.join(NAMES)}; got {asked!r}")
    name = asked or by_name
    if name is None:
        raise ValueError(f"--to must be given for {path}: of {', '.join(NAMES)}; or name it {', '.join(SUFFIXES)}")
    needed = next((suffix for suffix, format in SUFFIXES.items() if format == name and name != "mask"), None)
    if by_name is None and needed is not None:
        raise ValueError(f"{path} must be called {needed} for --to {name}")
    if by_name is not None and by_name != name:
        raise ValueError(
            f"{path} must not be called {path.suffix}, which is for {by_name}; got --to {name}. Name it {path.stem}.pt"
        )
    return name


def write(mask: BlockMask, path: Path, name: str, *, batch: int | None = None, head: int | None = None) -> BlockMask:
    """Writes the mask, or the mask of a batch element and a head, reads the file, and returns its contents.

    Raises ValueError if the format cannot represent the mask; nothing is written then.
    """
    mask = mask.canonical().select(batch=batch, heads=head)
    if name == "mask":
        mask.save(path)
    elif name == "scipy":
        from scipy import sparse

        matrix = interop.to_scipy(mask)
        if matrix.nnz > archives.MOST_ENTRIES or _bytes(matrix) > archives.MOST_INFLATED:
            said = archives.too_large(f"a matrix of {matrix.nnz} entries and {_bytes(matrix)} bytes")
            raise ValueError(f"--to scipy must be given a mask that can be read again; got {said}")
        with path.open("wb") as file:  # given a name, SciPy would add a suffix
            sparse.save_npz(file, matrix)
    elif name == "dense":
        dense = mask.to_dense().numpy()
        with path.open("wb") as file:
            np.save(file, dense)
    else:
        fields = FORMATS[name].fields(mask)
        torch.save({"kind": _KIND, "format": name, "block": [mask.block_q, mask.block_k], "fields": fields}, path)
    return read(path, block=(mask.block_q, mask.block_k))


def read(path: Path, *, block: tuple[int, int] = (128, 128)) -> BlockMask:
    """The mask in a file that `write` wrote, or in any .npz of SciPy and .npy of NumPy.

    block: of the mask, for files that do not say it. Nothing in the file is run. Raises ValueError for a file without a
    mask, whatever its contents, and OSError for a file that cannot be read.
    """
    if path.suffix == ".npy":
        return _made_of(path, lambda: BlockMask.from_dense(_dense(path), block=block))
    members = archives.members(path)
    if path.suffix == ".npz" and "numbers.npy" not in members:
        from scipy import sparse

        def made() -> BlockMask:
            archives.check_npz(path)
            return interop.from_scipy(sparse.load_npz(path), block=block)

        return _made_of(path, made)
    if not any(name.endswith("/data.pkl") for name in members):
        return BlockMask.load(path)
    return _made_of(path, lambda: _stored(path))


def _stored(path: Path) -> BlockMask:
    archives.check_pt(path)
    stored = torch.load(path, weights_only=True)
    if not isinstance(stored, dict) or stored.get("kind") != _KIND or stored.get("format") not in FORMATS:
        raise ValueError("another one of torch.save")
    archives.check_views(stored["fields"])
    return FORMATS[stored["format"]].mask(stored["fields"], tuple(stored["block"]))


def _made_of(path: Path, made: Callable[[], BlockMask]) -> BlockMask:
    try:
        return made()
    except OSError:
        raise
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path} must be a file that convert wrote; got {reason}") from None


def _dense(path: Path) -> np.ndarray[Any, Any]:
    """The array of a .npy file, memory-mapped first, because its header may state any size."""
    return np.array(np.load(path, mmap_mode="r", allow_pickle=False))


def _bytes(matrix: Any) -> int:
    return sum(array.nbytes for array in (matrix.data, matrix.indices, matrix.indptr))
