"""Compares the sizes that files of NumPy, SciPy and PyTorch state with their contents, before memory is allocated.

A few bytes of a compressed file can expand to gigabytes, and a tensor can be a view that repeats one stored element.
"""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST_INFLATED = 2**31  # bytes: arrays may exceed their compressed size by this much
MOST_ENTRIES = 2**28  # of a sparse matrix; the conversion to a mask takes some 30 bytes per entry


def members(path: Path) -> list[str]:
    """The names in a zip file, the format of NumPy and PyTorch; empty if it is not a zip file or is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except OSError:
        raise
    except Exception:
        return []


def check_npz(path: Path) -> None:
    """Raises ValueError if the arrays of a .npz file differ from the sizes in its headers, or are too large."""
    with zipfile.ZipFile(path) as archive:
        inflated = sum(member.file_size - member.compress_size for member in archive.infolist())
        if inflated > MOST_INFLATED:
            raise ValueError(too_large(f"arrays that are {inflated} bytes larger than their file"))
        for member in archive.infolist():
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"a member {member.filename!r} that NumPy did not compress")
            with archive.open(member) as file:
                if np.lib.format.read_magic(file) != (1, 0):
                    raise ValueError(f"a member {member.filename!r} that is not a plain NumPy array")
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
                size, held = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
            if size != held or dtype.hasobject:
                raise ValueError(f"a member {member.filename!r} of {dtype} {list(shape)} with {held} bytes")
            if member.filename == "data.npy" and math.prod(shape) > MOST_ENTRIES:
                raise ValueError(too_large(f"{math.prod(shape)} stored entries"))


def too_large(found: str) -> str:
    """Why a sparse matrix is neither written nor read, and what to do instead."""
    return (
        f"{found}; at most {MOST_INFLATED} bytes and {MOST_ENTRIES} entries are read from a .npz file of SciPy. "
        "Store the mask as .mask (BlockMask.save), or in Python call interop.from_scipy(scipy.sparse.load_npz(path))"
    )


def check_pt(path: Path) -> None:
    """Raises ValueError if a file of `torch.save` is compressed.

    PyTorch reads such files, but never writes them.
    """
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
                raise ValueError(f"a compressed member {member.filename!r}")


def check_views(value: Any) -> None:
    """Raises ValueError if a tensor in the values of a file has more elements than its storage."""
    if isinstance(value, dict):
        for each in value.values():
            check_views(each)
    elif isinstance(value, Tensor) and value.layout == torch.strided:
        if value.numel() * value.itemsize > value.untyped_storage().nbytes():
            raise ValueError(f"a tensor of shape {list(value.shape)} that repeats the elements of its file")
    elif isinstance(value, Tensor):
        parts = (value._indices(), value._values()) if value.layout == torch.sparse_coo else _compressed(value)
        for part in parts:
            check_views(part)


def _compressed(value: Tensor) -> tuple[Tensor, ...]:
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return value.crow_indices(), value.col_indices(), value.values()
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return value.ccol_indices(), value.row_indices(), value.values()
    raise ValueError(f"a tensor with the layout {value.layout}")
