import errno
import hashlib
import io
import os
import re
import stat
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, masks
from sparseflash.blockmask import serialization
from tests.drawn.masks import block_masks
from tests.processes.forked import python

ARRAYS = ("indptr", "indices", "tile", "bits", "pattern", "lengths")


def example():
    generator = torch.Generator().manual_seed(0)
    dense = torch.rand(2, 2, 70, 50, generator=generator) < 0.5
    dense[:, :, :32, :32] = True
    dense[1] = dense[0].flip(0)
    return BlockMask.from_dense(dense, block=(32, 16)).with_lengths(torch.tensor([70, 33]))


def contents(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def npy(array):
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), version=(1, 0))
    return file.getvalue()


def write(path, members, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items() if isinstance(members, dict) else members:
            archive.writestr(name, data)


def forge(path, version=serialization.VERSION, **changes):
    mask = example()
    arrays = {
        "format": np.array(serialization.FORMAT),
        "version": np.array(version, dtype="<i8"),
        "numbers": np.array([mask.q_len, mask.k_len, mask.block_q, mask.block_k], dtype="<i8"),
    }
    arrays |= {name: getattr(mask, name).numpy() for name in ARRAYS}
    arrays |= {name: np.asarray(change, dtype=arrays[name].dtype) for name, change in changes.items()}
    arrays["digest"] = np.frombuffer(serialization._digest(arrays), dtype="|u1")
    write(path, {f"{name}.npy": npy(array) for name, array in arrays.items()})


def refused(path, why=""):
    with pytest.raises(ValueError) as caught:
        BlockMask.load(path)
    assert type(caught.value) is ValueError, repr(caught.value)
    assert str(path) in str(caught.value)
    assert re.search(why, str(caught.value)), str(caught.value)


# ---------------------------------------------------------------------- the round trip


@given(mask=block_masks(batch=2, heads=3))
def test_a_saved_mask_comes_back_equal(tmp_path_factory, mask):
    path = tmp_path_factory.mktemp("masks") / "a.mask"
    mask.save(path)
    back = BlockMask.load(path)
    assert back == mask and hash(back) == hash(mask)
    assert (back.lengths is None) == (mask.lengths is None)
    back.validate()


@given(mask=block_masks(batch=2, heads=2))
def test_equal_masks_give_the_same_bytes(tmp_path_factory, mask):
    folder = tmp_path_factory.mktemp("masks")
    mask.save(folder / "a")
    BlockMask.load(folder / "a").save(folder / "b")
    assert (folder / "a").read_bytes() == (folder / "b").read_bytes()


def test_the_bytes_are_the_same_on_every_day_and_machine(tmp_path):
    masks.butterfly(1000).save(tmp_path / "mask")
    # A change of this number is a change of the format: raise serialization.VERSION.
    assert hashlib.sha256((tmp_path / "mask").read_bytes()).hexdigest()[:16] == "4fcc2e3831340656"


def test_a_file_of_version_1_has_one_length_for_queries_and_keys(tmp_path):
    forge(tmp_path / "mask", version=1, lengths=np.array([70, 33]))
    assert BlockMask.load(tmp_path / "mask") == example()


def test_the_path_is_taken_as_given_and_numpy_reads_the_file(tmp_path):
    mask = example()
    mask.save(str(tmp_path / "name.without.npz"))
    assert [p.name for p in tmp_path.iterdir()] == ["name.without.npz"]
    with np.load(tmp_path / "name.without.npz", allow_pickle=False) as arrays:
        assert str(arrays["format"]) == "sparseflash.BlockMask" and int(arrays["version"]) == 2
        assert arrays["numbers"].tolist() == [70, 50, 32, 16]
        for name in ARRAYS:
            assert np.array_equal(arrays[name], getattr(mask, name).numpy())


def test_a_file_written_again_by_numpy_is_the_same_mask(tmp_path):
    example().save(tmp_path / "mask")
    with np.load(tmp_path / "mask") as arrays:
        np.savez(tmp_path / "again.npz", **arrays)
    assert BlockMask.load(tmp_path / "again.npz") == example()


def test_load_puts_the_mask_on_a_device(tmp_path, monkeypatch):
    example().save(tmp_path / "mask")
    monkeypatch.setattr(BlockMask, "to", lambda mask, device: (mask, device))
    assert BlockMask.load(tmp_path / "mask", device="cuda:3") == (example(), "cuda:3")


def test_saving_replaces_the_file_that_is_there_and_leaves_no_other(tmp_path):
    path = tmp_path / "mask"
    path.write_bytes(b"x" * 100_000)
    example().save(path)
    assert BlockMask.load(path) == example()
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_has_the_permissions_of_any_new_file(tmp_path):
    old = os.umask(0o027)
    try:
        example().save(tmp_path / "mask")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "mask").stat().st_mode) == 0o640


def test_what_cannot_be_written_leaves_the_old_file_and_no_new_one(tmp_path, monkeypatch):
    path = tmp_path / "mask"
    example().save(path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
        masks.causal(200).save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_saving_into_nothing_or_onto_a_folder_names_the_path(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(f"'{tmp_path}/none/mask'")):
        example().save(tmp_path / "none" / "mask")
    with pytest.raises(OSError, match=re.escape(f"'{tmp_path}'")):
        example().save(tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- damage


def test_no_file_a_folder_a_pipe_and_a_device_are_operating_system_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="none"):
        BlockMask.load(tmp_path / "none")
    with pytest.raises(IsADirectoryError, match="a mask must be loaded from a regular file"):
        BlockMask.load(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(OSError, match="a mask must be loaded from a regular file"):
            BlockMask.load(path)


def test_a_flipped_byte_is_refused_or_changes_nothing(tmp_path):
    """Only bytes of zip headers that hold dates and attributes may change."""
    path = tmp_path / "mask"
    mask = example()
    mask.save(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    accepted = 0
    places = sorted({*range(0, len(whole), 11), *range(len(whole) - 200, len(whole))})
    assert len(places) >= 200
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            back = BlockMask.load(path)
        except ValueError as error:
            assert str(path) in str(error)
        else:
            assert back == mask, f"byte {place} made another mask"
            accepted += 1
    assert accepted < len(places) // 4


@given(data=st.data())
def test_damage_of_any_kind_is_refused_or_changes_nothing(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("masks") / "mask"
    mask = data.draw(block_masks(most_tokens=40, blocks=(16,), batch=2, heads=2))
    mask.save(path)
    whole = path.read_bytes()
    for _ in range(8):
        start = data.draw(st.integers(0, len(whole) - 1))
        stop = data.draw(st.integers(start, min(start + 200, len(whole))) | st.just(len(whole)))
        path.write_bytes(whole[:start] + data.draw(st.binary(max_size=40)) + whole[stop:])
        try:
            back = BlockMask.load(path)
        except ValueError as error:
            assert str(path) in str(error)
        else:
            assert back == mask


def test_exchanged_arrays_that_make_a_valid_mask_are_refused(tmp_path):
    layout = torch.zeros(2, 2, dtype=torch.bool)
    layout[0, 1] = True
    dense = layout.repeat_interleave(16, 0).repeat_interleave(16, 1)
    dense[16, 0] = True
    mask = BlockMask.from_dense(dense, block=16)
    assert mask.indices.tolist() == [1, 0] and mask.tile.tolist() == [0, 1]
    other = BlockMask(32, 32, 16, 16, mask.indptr, mask.tile, mask.indices, mask.bits, mask.pattern)
    assert other.validate() != mask  # only the digest can tell
    path = tmp_path / "mask"
    mask.save(path)
    members = contents(path)
    write(path, members | {"indices.npy": members["tile.npy"], "tile.npy": members["indices.npy"]})
    refused(path, "do not agree with their digest")


@pytest.mark.parametrize("name", ARRAYS)
def test_another_dtype_or_rank_is_refused(tmp_path, name):
    path = tmp_path / "mask"
    example().save(path)
    members = contents(path)
    array = getattr(example(), name).numpy()
    for dtype in ("<i8", "<f4", ">i4", "|b1", "<u4", "|S4", "<M8[s]"):
        write(path, members | {f"{name}.npy": npy(array.astype(dtype))})
        refused(path, f"a member '{name}' of type '{re.escape(dtype)}' instead of '<i4'")
    write(path, members | {f"{name}.npy": npy(array[None])})
    refused(path, f"a member '{name}' of shape")
    write(path, members | {f"{name}.npy": npy(np.asfortranarray(np.zeros((2, 2), dtype="<i4")))})
    refused(path, f"a member '{name}' that is not a plain NumPy array")
    structured = np.zeros(2, dtype=[("a", "<i4")])
    write(path, members | {f"{name}.npy": npy(structured)})
    refused(path, f"a member '{name}' that is not a plain NumPy array")
    write(path, members | {f"{name}.npy": npy(array.flatten()[:1].reshape([1] * array.ndim))})
    refused(path)


def test_objects_are_refused_without_unpickling_them(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    path = tmp_path / "mask"
    example().save(path)
    members = contents(path)
    for name in ("indptr", "format", "bits"):
        file = io.BytesIO()
        np.lib.format.write_array(file, np.array([Trap()], dtype=object), allow_pickle=True)
        write(path, members | {f"{name}.npy": file.getvalue()})
        refused(path, "of type '.O' instead of")
    assert not (tmp_path / "sprung").exists()


def test_missing_double_and_unknown_members_are_refused(tmp_path):
    path = tmp_path / "mask"
    example().save(path)
    members = contents(path)
    for name in members:
        write(path, {other: data for other, data in members.items() if other != name})
        refused(path, "digest" if name == "lengths.npy" else f"no member '{name[:-4]}'")
        with pytest.warns(UserWarning, match="Duplicate name"):
            write(path, [*members.items(), (name, members[name])])
        refused(path, f"the member '{name[:-4]}' 2 times")
    for name in ("extra.npy", "indptr", "../indptr.npy", "INDPTR.npy", "indptr.npy/"):
        write(path, members | {name: b""})
        refused(path, f"an unknown member '{re.escape(name)}'")


def test_another_version_or_format_is_refused(tmp_path):
    path = tmp_path / "mask"
    example().save(path)
    members = contents(path)
    write(path, members | {"version.npy": npy(np.array(3))})
    refused(path, "got version 3, where this sparseflash reads versions up to 2")
    write(path, members | {"version.npy": npy(np.array(1))})
    refused(path, r"a member 'lengths' of shape \[2, 2\] in a file of version 1")
    write(path, members | {"format.npy": npy(np.array("sparseflash.BlockMusk"))})
    refused(path, "got the format 'sparseflash.BlockMusk' instead of 'sparseflash.BlockMask'")
    write(path, members | {"numbers.npy": npy(np.array([1, 2, 3]))})
    refused(path, "3 numbers instead of q_len, k_len, block_q, block_k")


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "file"
    np.savez(tmp_path / "a.npz", x=np.arange(3))
    np.save(tmp_path / "b.npy", np.arange(3))
    torch.save(torch.zeros(3), tmp_path / "c.pt")
    with zipfile.ZipFile(tmp_path / "d.zip", "w"):
        pass
    for other in sorted(tmp_path.iterdir()):
        refused(other)
    for data in (b"", b"PK", b"not a mask", bytes(10_000), b"\xff" * 10_000):
        path.write_bytes(data)
        refused(path)


def test_bombs_are_refused_before_they_are_unpacked(tmp_path):
    path = tmp_path / "mask"
    example().save(path)
    members = contents(path)
    for compression in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        write(path, members | {"bits.npy": bytes(5_000_000)}, compression)
        assert path.stat().st_size < 100_000
        refused(path, "a compressed member")
    header = npy(np.zeros((2, 32, 1), dtype="<i4")).replace(b"(2, 32, 1), }            ", b"(99999999999, 32, 1), }  ")
    assert b"99999999999" in header
    write(path, members | {"bits.npy": header})
    refused(path, r"of shape \[99999999999, 32, 1\] with 256 bytes")
    shape = b"(" + b"9" * 5000 + b",)"
    huge = b"\x93NUMPY\x01\x00" + (5100).to_bytes(2, "little")
    huge += (b"{'descr': '<i4', 'fortran_order': False, 'shape': " + shape + b", }").ljust(5099) + b"\n"
    write(path, members | {"indptr.npy": huge})
    refused(path)


def test_overlapping_members_are_refused(tmp_path):
    """A zip bomb without compression."""
    path = tmp_path / "mask"
    mask = example()
    mask.save(path)
    whole = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        infos = {info.filename: info for info in archive.infolist()}
    directory = whole.index(b"PK\x01\x02")
    entry = whole.index(b"indices.npy", directory) - 46
    for field, value in ((20, len(whole)), (24, len(whole)), (42, infos["indptr.npy"].header_offset)):
        damaged = bytearray(whole)
        damaged[entry + field : entry + field + 4] = value.to_bytes(4, "little")
        path.write_bytes(damaged)
        refused(path)


def test_members_that_are_longer_than_the_file_are_refused_before_any_is_read(tmp_path, monkeypatch):
    path = tmp_path / "mask"
    example().save(path)
    whole = bytearray(path.read_bytes())
    entry = whole.index(b"indices.npy", whole.index(b"PK\x01\x02")) - 46
    whole[entry + 20 : entry + 28] = (2**31 - 1).to_bytes(4, "little") * 2
    path.write_bytes(whole)
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("a member was read"))
    refused(path, rf"members of \d{{10}} bytes in a file of {len(whole)}")


def test_an_encrypted_member_is_refused(tmp_path):
    path = tmp_path / "mask"
    example().save(path)
    whole = bytearray(path.read_bytes())
    whole[whole.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(whole)
    refused(path, "encrypted")


NNZ = len(example().indices)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"indices": np.full(NNZ, 99)}, "indices must lie in"),
        ({"indices": np.full(NNZ, -1)}, "indices must lie in"),
        ({"tile": np.full(NNZ, 2**31 - 1)}, "tile must lie in"),
        ({"tile": np.full(NNZ, -5)}, "tile must lie in"),
        ({"indptr": np.array([0, 9, 2, 7, 10, 12, NNZ])}, "indptr must not decrease"),
        ({"indptr": np.array([0, 1, 2, 3, 4, 5, 2**31 - 1])}, "indptr must run from 0 to"),
        ({"indptr": np.array([-(2**31), 1, 2, 3, 4, 5, NNZ])}, "indptr must run from 0 to"),
        ({"indptr": np.zeros(0)}, "indptr must have"),
        ({"pattern": np.full((2, 2), 7)}, "pattern must lie in"),
        ({"pattern": np.full((2, 2), -1)}, "pattern must lie in"),
        ({"pattern": np.zeros((2, 0))}, "pattern must have shape"),
        ({"lengths": np.array([[70, -1], [50, 33]])}, "lengths of queries must lie in"),
        ({"lengths": np.array([[70, 33], [50, 51]])}, "lengths of keys must lie in"),
        ({"lengths": np.array([[70, 1, 1], [50, 1, 1]])}, "lengths must have shape"),
        ({"lengths": np.array([70, 33])}, "in a file of version 2"),
        ({"numbers": np.array([2**40, 50, 32, 16])}, "q_len must be between"),
        ({"numbers": np.array([-70, 50, 32, 16])}, "q_len must be between"),
        ({"numbers": np.array([2**31 - 300, 50, 32, 16])}, "indptr must have"),
        ({"numbers": np.array([70, 50, 0, 16])}, "block must be one of"),
        ({"numbers": np.array([70, 50, 32, 2**62])}, "block must be one of"),
        ({"bits": np.zeros((0, 32, 1))}, "tile must lie in"),
        ({"bits": np.full((len(example().bits), 32, 1), -1)}, "a tile with every score live|bits past the block"),
        ({"bits": np.zeros((11, 32, 2))}, "bits must have shape"),
    ],
)
def test_arrays_that_are_no_mask_are_refused_though_their_digest_is_right(tmp_path, changes, why):
    path = tmp_path / "mask"
    forge(path)
    assert BlockMask.load(path) == example()
    forge(path, **changes)
    refused(path, why)


def test_loading_takes_memory_in_proportion_to_the_file(tmp_path):
    """In a process that may have 4 GiB of address space."""
    example().save(tmp_path / "mask")
    forge(tmp_path / "forged", numbers=np.array([2**31 - 300, 2**31 - 300, 16, 16]))
    program = f"""
import resource
from sparseflash import BlockMask
resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
BlockMask.load({str(tmp_path / "mask")!r})
try:
    BlockMask.load({str(tmp_path / "forged")!r})
except ValueError as error:
    assert "indptr must have" in str(error), error
else:
    raise AssertionError("accepted")
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
