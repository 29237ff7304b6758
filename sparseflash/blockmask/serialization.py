"""Masks as files: one uncompressed npz, written atomically and validated in full when it is read.

Members, each a NumPy array (so `numpy.load(path)` shows them): `format` and `version`, which identify the file;
`numbers`, int64 `[q_len, k_len, block_q, block_k]`; the int32 arrays `indptr`, `indices`, `tile`, `bits`, `pattern`
and, if the mask has them, `lengths` `[2, B]`; `digest`, BLAKE2b over all of those. Equal masks give equal bytes.

Nothing is compressed, so no member can be larger than the file: a malicious header cannot make `load` allocate more.
"""

from __future__ import annotations

import errno
import hashlib
import io
import math
import os
import re
import secrets
import stat
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask

FORMAT = "sparseflash.BlockMask"
VERSION = 2
_READABLE = (1, 2)  # in version 1 one length serves queries and keys
Path = str | os.PathLike[str]

# Member: dtype and number of dimensions.
_HEAD = {"format": (f"<U{len(FORMAT)}", 0), "version": ("<i8", 0), "numbers": ("<i8", 1)}
_ARRAYS = {"indptr": ("<i4", 1), "indices": ("<i4", 1), "tile": ("<i4", 1), "bits": ("<i4", 3), "pattern": ("<i4", 2)}
_OPTIONAL = {"lengths": ("<i4", 2)}
_RANKS_OF_VERSION_1 = {"lengths": 1}
_TAIL = {"digest": ("|u1", 1)}
_MEMBERS = _HEAD | _ARRAYS | _OPTIONAL | _TAIL
_DIGEST_BYTES = 32

# The header that NumPy writes for a plain array. Accepting only this form means that nothing is evaluated.
_NPY_MAGIC = b"\x93NUMPY\x01\x00"
_NPY_HEADER = re.compile(rb"\{'descr': '([^']*)', 'fortran_order': False, 'shape': \(([0-9, ]*)\), \} *\n")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date that a zip file can hold


def save(mask: BlockMask, path: Path) -> None:
    """Writes a mask to one file; see `BlockMask.save`."""
    contents = _contents(mask)
    path = os.fspath(path)
    folder, name = os.path.split(path)
    # In the same folder, because a rename is atomic only within one file system. `tempfile` would ignore the umask.
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            try:
                file.write(contents)
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), path) from error  # not the temporary file's name


def load(path: Path, *, device: torch.device | str | None = None) -> BlockMask:
    """Reads a mask from a file that `save` wrote; see `BlockMask.load`."""
    from sparseflash.blockmask import BlockMask

    path = os.fspath(path)
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would block until it has a writer
        kind = errno.EISDIR if os.path.isdir(path) else errno.EINVAL
        raise OSError(kind, "a mask must be loaded from a regular file", path)
    with open(path, "rb") as file:
        try:
            arrays = _read(file, os.fstat(file.fileno()).st_size)
            head = {name: arrays.pop(name) for name in _HEAD}
            q_len, k_len, block_q, block_k = head["numbers"].tolist()
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items() if name != "digest"}
            mask = BlockMask(q_len, k_len, block_q, block_k, dynamic=False, **tensors).validate()
        except OSError as error:
            raise OSError(error.errno or errno.EIO, error.strerror or str(error), path) from error
        except ValueError as error:
            raise ValueError(f"{path} must be a sparseflash mask file, whole and undamaged; got {error}") from error
    return mask if device is None else mask.to(device)


def _contents(mask: BlockMask) -> bytes:
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "format": np.array(FORMAT),
        "version": np.array(VERSION),
        "numbers": np.array([mask.q_len, mask.k_len, mask.block_q, mask.block_k]),
    }
    for name in (*_ARRAYS, *_OPTIONAL):
        tensor = getattr(mask, name)
        if tensor is not None:
            arrays[name] = tensor.cpu().numpy()
    arrays = {name: np.ascontiguousarray(array, dtype=_MEMBERS[name][0]) for name, array in arrays.items()}
    for name in _HEAD:
        arrays[name] = arrays[name].reshape([4] if name == "numbers" else [])
    arrays["digest"] = np.frombuffer(_digest(arrays), dtype="|u1")
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            member = zipfile.ZipInfo(f"{name}.npy", _EPOCH)
            member.create_system, member.external_attr = 3, 0o644 << 16
            npy = io.BytesIO()
            np.lib.format.write_array(npy, array, version=(1, 0), allow_pickle=False)
            archive.writestr(member, npy.getvalue())
    return file.getvalue()


def _read(file: io.BufferedReader, size: int) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of the file by name, checked for everything that `BlockMask` does not check itself.

    Raises nothing but ValueError or OSError, whatever the file holds.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            names = [member.filename.removesuffix(".npy") for member in members]
            _check_members(members, names, size)
            arrays = {name: _array(name, archive.read(member)) for name, member in zip(names, members, strict=True)}
    except ValueError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # the medium's; EINVAL is of a damaged offset
            raise
        # zipfile reports damage as BadZipFile, EOFError, NotImplementedError, RuntimeError, struct.error, ...
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if str(arrays["format"]) != FORMAT:
        raise ValueError(f"the format {str(arrays['format'])!r} instead of {FORMAT!r}")
    version = int(arrays["version"])
    if version not in _READABLE:
        raise ValueError(f"version {version}, where this sparseflash reads versions up to {VERSION}")
    for name, rank in _RANKS_OF_VERSION_1.items():
        if name in arrays and (arrays[name].ndim == rank) != (version == 1):
            raise ValueError(f"a member {name!r} of shape {list(arrays[name].shape)} in a file of version {version}")
    if arrays["numbers"].shape != (4,):
        raise ValueError(f"{arrays['numbers'].size} numbers instead of q_len, k_len, block_q, block_k")
    if arrays["digest"].tobytes() != _digest({name: a for name, a in arrays.items() if name != "digest"}):
        raise ValueError("arrays that do not agree with their digest")
    if version == 1 and "lengths" in arrays:
        ends = arrays["numbers"][:2, None].clip(max=np.iinfo(np.int32).max)
        arrays["lengths"] = np.minimum(arrays["lengths"], ends.astype(np.int32))
    return arrays


def _check_members(members: list[zipfile.ZipInfo], names: list[str], size: int) -> None:
    """The checks that need only the directory of the archive."""
    for member, name in zip(members, names, strict=True):
        if name not in _MEMBERS or member.filename != f"{name}.npy":
            raise ValueError(f"an unknown member {member.filename!r}")
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise ValueError(f"a compressed member {member.filename!r}")
    for name in _MEMBERS:
        if names.count(name) > 1:
            raise ValueError(f"the member {name!r} {names.count(name)} times")
        if name not in names and name not in _OPTIONAL:
            raise ValueError(f"no member {name!r}")
    total = sum(member.file_size for member in members)
    if total > size:
        raise ValueError(f"members of {total} bytes in a file of {size}")


def _array(name: str, npy: bytes) -> np.ndarray[Any, Any]:
    dtype, rank = _MEMBERS[name]
    length = int.from_bytes(npy[8:10], "little")
    header = _NPY_HEADER.fullmatch(npy[10 : 10 + length])
    if not npy.startswith(_NPY_MAGIC) or header is None:
        raise ValueError(f"a member {name!r} that is not a plain NumPy array")
    if header[1].decode("latin-1") != dtype:
        raise ValueError(f"a member {name!r} of type {header[1].decode('latin-1')!r} instead of {dtype!r}")
    shape = tuple(int(n) for n in header[2].replace(b" ", b"").split(b",") if n)
    if len(shape) not in (rank, _RANKS_OF_VERSION_1.get(name)):
        raise ValueError(f"a member {name!r} of shape {list(shape)} instead of {rank} dimensions")
    data = npy[10 + length :]
    if math.prod(shape) * np.dtype(dtype).itemsize != len(data):
        raise ValueError(f"a member {name!r} of shape {list(shape)} with {len(data)} bytes")
    array = np.frombuffer(data, dtype=dtype).reshape(shape)
    return array.astype(array.dtype.newbyteorder("="))  # copied: PyTorch warns of read-only arrays


def _digest(arrays: dict[str, np.ndarray[Any, Any]]) -> bytes:
    """BLAKE2b over names, shapes and values, in the order of `_MEMBERS`.

    The zip checksums of the members would not reveal that two of them were exchanged.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name, (dtype, _) in _MEMBERS.items():
        if name in arrays:
            digest.update(f"{name} {arrays[name].shape} ".encode())
            digest.update(np.ascontiguousarray(arrays[name], dtype=dtype).tobytes())
    return digest.digest()
