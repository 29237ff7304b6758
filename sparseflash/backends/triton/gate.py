"""Whether the kernels for Hopper may serve under a version of Triton that they were not measured with.

Gluon's interface and the compiler's choices change from version to version. Under the versions of `versions.py` the
kernels serve at once. Under another one, each kind of them is tried once before it serves: `kernel_check.py` compiles
it, reads what the assembler says of it, and compares its results with the definition in fp64. A kernel that is compiled
wrong may wait for ever or leave the process without a usable GPU. So it is tried in a process of its own, which takes
some 20 seconds. This process does nothing on the GPU meanwhile, so it may even record a CUDA graph. The verdict is kept
beside Triton's cache, in a file for each kind of kernel, version, device and state of our sources.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sparseflash.backends.triton.versions import is_measured, named, releases, triton_release, triton_version
from sparseflash.blockmask.cache import BoundedDict, bounded

if TYPE_CHECKING:  # which imports kernels: without Triton `availability` is to say so first
    from sparseflash.backends.triton.family import Request

MODULE = "sparseflash.backends.triton.kernel_check"
TRYING = "trying the kernels"  # the line that the other process prints before it runs one
_SECONDS = 300  # after which it hangs
_log = logging.getLogger("sparseflash")
_lock = threading.Lock()
_verdicts = BoundedDict(256)  # by kind and device
_is_open = False


class Kind(NamedTuple):
    """What decides which kernels a pass compiles, in terms that JSON has."""

    dtype: str
    dim: int
    small: bool  # blocks of 64
    lengths: bool
    changes: tuple[str, ...]  # names of functions of `scores`
    learned: tuple[str, ...]  # those of them whose tensors get gradients
    backward: bool


class Verdict(NamedTuple):
    """What came of trying a kind of kernels; `why` says what is wrong, and is empty if nothing is."""

    why: str
    file: str = ""  # that keeps the verdict; "": none does


def refuses(request: Request) -> str | None:
    """Why the kernels for Hopper must not serve a request that they could serve, under this Triton; None if they may.

    Without a GPU of compute capability 9.0 nothing can be tried, and the answer is None.
    """
    if is_measured(triton_version()) or _is_open:
        return None
    device = gpu_of(request)
    if device is None:
        return None
    found = verdict(kind_of(request), device)
    return f"{_unmeasured()}, and {found.why}" if found.why else None


def note(request: Request) -> str | None:
    """What `explain` says of kernels for Hopper that serve a request under a version that was not measured."""
    if is_measured(triton_version()):
        return None
    done = "they passed their check on this GPU" if gpu_of(request) else "they are checked on a GPU before they serve"
    return f"Triton {triton_release()} is not among the versions that the kernels for Hopper were measured with: {done}"


def gpu_of(request: Request) -> torch.device | None:
    """The GPU that would serve a request; None if it is only asked what another would do."""
    device = request.device
    if device is None or device.type != "cuda" or torch.cuda.get_device_capability(device) != request.capability:
        return None
    return device


def remedy(request: Request) -> str:
    """How to get the kernels for Hopper back for a request that is refused."""
    device = gpu_of(request)
    file = "" if device is None else verdict(kind_of(request), device).file
    again = f"delete {file}" if file else "start another process"
    return f"install a PyTorch whose Triton was measured ({releases()}), or {again} to repeat the check"


def _unmeasured() -> str:
    return f"Triton {triton_release()} is not among the versions that they were measured with, {named()}"


def kind_of(request: Request) -> Kind:
    """The kind of the kernels that serve a request."""
    decay = "log_decay" if request.logarithmic else "alibi"
    changes, learned = (
        tuple(decay if each == "distance" else each for each in kinds) for kinds in (request.changes, request.learned)
    )
    small = request.block == (64, 64) and not request.backward
    return Kind(
        str(request.dtype).removeprefix("torch."), request.dims[0], small, request.lengths, changes, learned,
        request.backward,
    )  # fmt: skip


def verdict(kind: Kind, device: torch.device) -> Verdict:
    """What came of trying these kernels on this GPU, now or before."""
    key = kind, device.index
    found: Verdict | None = _verdicts.get(key)
    if found is None:
        with _lock:  # other threads wait for the one that tries
            found = _verdicts.get(key)
            if found is None:
                facts = {**_facts(device), **kind._asdict()}
                file = _file_of(facts)
                found = _verdicts.put(key, _read(file) or _tried(kind, device, file, facts))
    return found


@contextmanager
def opened() -> Iterator[None]:
    """Lets all kernels serve inside the block, to try them."""
    global _is_open
    before, _is_open = _is_open, True
    try:
        yield
    finally:
        _is_open = before


@bounded(maxsize=16)
def _facts(device: torch.device) -> dict[str, Any]:
    """All that a verdict depends on besides the kind of the kernels."""
    capability = torch.cuda.get_device_capability(device)
    try:
        from triton.backends.nvidia.compiler import get_ptxas_version

        assembler = str(get_ptxas_version(10 * capability[0] + capability[1])).strip()
    except Exception as error:  # Triton does not document it; Triton's own version stands for it then
        assembler = type(error).__name__
    return {
        "triton": triton_release(), "assembler": assembler, "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device), "capability": list(capability), "sources": _sources(),
    }  # fmt: skip


@bounded(maxsize=1)
def _sources() -> str:
    """The digest of the kernels' sources."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _file_of(facts: dict[str, Any]) -> Path:
    """The file that keeps a verdict, in Triton's cache."""
    from triton import knobs

    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return Path(knobs.cache.dir) / f"sparseflash-{digest[:32]}.json"


def _read(file: Path) -> Verdict | None:
    try:
        return Verdict(json.loads(file.read_text())["why"], str(file))
    except (OSError, ValueError, KeyError, TypeError):  # none there, or not one of ours
        return None


def _write(file: Path, facts: dict[str, Any], why: str) -> bool:
    """Writes a verdict at once, so that no process reads half of it; whether that was possible."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False) as scratch:
            json.dump({"why": why, **facts}, scratch, indent=1)
        os.replace(scratch.name, file)
    except OSError:  # a full or read-only disk: the next process tries again
        return False
    return True


def _tried(kind: Kind, device: torch.device, file: Path, facts: dict[str, Any]) -> Verdict:
    """Tries the kernels in another process. What it could not find out is not kept."""
    _log.info("%s: they are compiled and checked now, once: %s", _unmeasured(), kind)
    why, is_certain = outcome(command(kind, device))
    _log.info("the check of the kernels for Hopper %s", f"found: {why}" if why else "passed")
    return Verdict(why, str(file) if is_certain and _write(file, facts, why) else "")


def command(kind: Kind, device: torch.device) -> list[str]:
    """What tries these kernels on this GPU."""
    return [sys.executable or "python", "-m", MODULE, json.dumps(kind), str(device)]


def outcome(command: list[str]) -> tuple[str, bool]:
    """What is wrong with the kernels by the process that tries them, "" if nothing; and whether that is certain."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(each or os.getcwd() for each in sys.path)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS)
        status, said, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        status, said, errors = None, _text(late.stdout), _text(late.stderr)
    except OSError as error:
        return f"the process that checks them could not be started: {error}", False
    lines = said.splitlines()
    if status == 0 and lines:
        with suppress(ValueError, KeyError, TypeError):
            found = json.loads(lines[-1])
            return str(found["why"]), bool(found["certain"])
    ended = f"did not end within {_SECONDS} seconds" if status is None else f"ended with status {status}"
    last = [line for line in errors.splitlines() if line.strip()][-1:]
    return ": ".join([f"the process that checks them {ended}", *last]), TRYING in lines


def _text(said: str | bytes | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""
