"""Decides whether the Hopper kernels may run under a version of Triton that they were not measured with.

Under a version that is not in `versions.py`, each kind of kernel is checked once before its first use:
`kernel_check.py` compiles it, reads the report of ptxas, and compares results with the reference in fp64. A miscompiled
kernel may hang, or break its CUDA context, so the check runs in another process, some 20 seconds. The calling process
does not use the GPU meanwhile, so it may even be recording a CUDA graph. The verdict is stored in Triton's cache
folder, one file per kind of kernel, version, device and digest of our sources.
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

from sparseflash.backends.triton.hopper.configs import may_be_small
from sparseflash.backends.triton.versions import is_measured, named, releases, triton_release, triton_version
from sparseflash.blockmask.cache import BoundedDict, bounded

if TYPE_CHECKING:  # `family` imports kernels; without Triton, `availability` must raise its error first
    from sparseflash.backends.triton.family import Request

MODULE = "sparseflash.backends.triton.kernel_check"
TRYING = "trying the kernels"  # the line that the checking process prints before it runs a kernel
_SECONDS = 300  # a check that takes longer counts as hung
_CHECKING = "SPARSEFLASH_CHECKS_KERNELS"  # set in the environment of the checking process
# Variables that would change the check: interpreted kernels, warnings as errors, waiting for a terminal.
_NOT_PASSED_ON = {"TRITON_INTERPRET", "PYTHONWARNINGS", "PYTHONINSPECT"}
# Signals from a user, a scheduler or the OOM killer: SIGHUP, SIGINT, SIGKILL and SIGTERM.
_STOPPED = {-1, -2, -9, -15}
_log = logging.getLogger("sparseflash")
_lock = threading.Lock()
_verdicts = BoundedDict(256)
_is_open = False


class Kind(NamedTuple):
    """Everything that decides which kernels a pass compiles, in JSON types."""

    dtype: str
    dim: int
    small: bool  # blocks of 64
    lengths: bool
    changes: tuple[str, ...]  # names of functions of `scores`
    learned: tuple[str, ...]  # the ones whose tensors need gradients
    backward: bool
    v_dim: int = 0  # 0 if it equals `dim`


class Verdict(NamedTuple):
    """The result of checking a kind of kernel: `why` is the fault found, or "" if the check passed."""

    why: str
    file: str = ""  # where the verdict is stored; "" if nowhere


def refuses(request: Request) -> str | None:
    """Why the Hopper kernels must not serve a request under the installed Triton; None if they may.

    Without a GPU of compute capability 9.0 nothing can be checked, and the result is None.
    """
    if is_measured(triton_version()) or _is_open:
        return None
    device = gpu_of(request)
    if device is None:
        return None
    found = verdict(kind_of(request), device)
    return f"{_unmeasured()}, and {found.why}" if found.why else None


def note(request: Request) -> str | None:
    """The note of `explain` on Hopper kernels that serve a request under a version that was not measured."""
    if is_measured(triton_version()):
        return None
    done = "they passed their check on this GPU" if gpu_of(request) else "they are checked on a GPU before they serve"
    return f"Triton {triton_release()} is not among the versions that the kernels for Hopper were measured with: {done}"


def gpu_of(request: Request) -> torch.device | None:
    """The GPU that would serve a request; None if the request only asks what another GPU would do."""
    device = request.device
    if device is None or device.type != "cuda" or torch.cuda.get_device_capability(device) != request.capability:
        return None
    return device


def remedy(request: Request) -> str:
    """Advice on how to get the Hopper kernels back for a request that was refused."""
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
    small = request.block == (64, 64) and (
        not request.backward or may_be_small(request.block, request.dims, request.changes)
    )
    return Kind(
        str(request.dtype).removeprefix("torch."), request.dims[0], small, request.lengths, changes, learned,
        request.backward, request.dims[1] if request.dims[1] != request.dims[0] else 0,
    )  # fmt: skip


def verdict(kind: Kind, device: torch.device) -> Verdict:
    """The verdict on these kernels on this GPU, from the cache or from a check run now."""
    key = kind, device.index
    found: Verdict | None = _verdicts.get(key)
    if found is None:
        with _lock:  # other threads wait for the thread that runs the check
            found = _verdicts.get(key)
            if found is None:
                facts = {**_facts(device), **kind._asdict()}
                file = _file_of(facts)
                found = _verdicts.put(key, _read(file) or _tried(kind, device, file, facts))
    return found


@contextmanager
def opened() -> Iterator[None]:
    """Inside the block, unchecked kernels may run; for the check itself."""
    global _is_open
    before, _is_open = _is_open, True
    try:
        yield
    finally:
        _is_open = before


@bounded(maxsize=16)
def _facts(device: torch.device) -> dict[str, Any]:
    capability = torch.cuda.get_device_capability(device)
    try:
        from triton.backends.nvidia.compiler import get_ptxas_version

        assembler = str(get_ptxas_version(10 * capability[0] + capability[1])).strip()
    except Exception as error:  # the function is undocumented; the version of Triton is enough then
        assembler = type(error).__name__
    return {
        "triton": triton_release(), "assembler": assembler, "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device), "capability": list(capability), "sources": _sources(),
    }  # fmt: skip


@bounded(maxsize=1)
def _sources() -> str:
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _file_of(facts: dict[str, Any]) -> Path:
    try:
        from triton import knobs

        folder = Path(knobs.cache.dir)
    except (ImportError, AttributeError):
        folder = Path(os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache"))
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return folder / f"sparseflash-{digest[:32]}.json"


def _read(file: Path) -> Verdict | None:
    try:
        return Verdict(json.loads(file.read_text())["why"], str(file))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # no file, or not a file of ours
        return None


def _write(file: Path, facts: dict[str, Any], why: str) -> bool:
    """Writes a verdict atomically, so that no process reads a partial file; returns whether that worked."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            scratch = Path(folder) / file.name
            scratch.write_text(json.dumps({"why": why, **facts}, indent=1))
            os.replace(scratch, file)
    except OSError:  # a full or read-only disk: the next process tries again
        return False
    return True


def _tried(kind: Kind, device: torch.device, file: Path, facts: dict[str, Any]) -> Verdict:
    """An uncertain result is not stored."""
    _log.info("%s: they are compiled and checked now, once: %s", _unmeasured(), kind)
    why, is_certain = outcome(command(kind, device))
    _log.info("the check of the kernels for Hopper %s", f"found: {why}" if why else "passed")
    return Verdict(why, str(file) if is_certain and _write(file, facts, why) else "")


def command(kind: Kind, device: torch.device) -> list[str]:
    """The command that checks these kernels on this GPU."""
    return [sys.executable or "python", "-m", MODULE, json.dumps(kind), str(device)]


def outcome(command: list[str]) -> tuple[str, bool]:
    """Runs the check: `(the fault found, or "" if none, whether the result is certain)`."""
    if _CHECKING in os.environ or getattr(sys, "frozen", False):  # prevents endless recursion of processes
        return "they are checked only where sys.executable is Python and does not check kernels itself", False
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    environment["PYTHONPATH"] = os.pathsep.join(_paths())
    environment |= {"PYTHONSAFEPATH": "1", _CHECKING: "1"}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_SECONDS,
        )  # fmt: skip
        status, said, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        status, said, errors = None, _text(late.stdout), _text(late.stderr)
    except OSError as error:
        return f"the process that checks them could not be started: {error}", False
    lines = said.splitlines()
    # Threads that compile ahead may print reports of the assembler behind the verdict.
    for line in reversed(lines if status == 0 else ()):
        with suppress(ValueError, KeyError, TypeError):
            found = json.loads(line)
            return str(found["why"]), bool(found["certain"])
    ended = f"did not end within {_SECONDS} seconds" if status is None else f"ended with status {status}"
    last = [line[:300] for line in errors.splitlines() if line.strip()][-1:]
    return ": ".join([f"the process that checks them {ended}", *last]), TRYING in lines and status not in _STOPPED


def _paths() -> list[str]:
    here = ""
    with suppress(OSError):
        here = os.getcwd()
    return [each or here for each in sys.path if isinstance(each, str) and (each or here)]


def _text(said: str | bytes | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""
