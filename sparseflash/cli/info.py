"""The machine: versions, devices, which kernels are usable and why not, caches on disk."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch

from sparseflash import __version__, attention, explain, masks
from sparseflash.backends.triton import native
from sparseflash.cli.output import threads

_PACKAGES = ("torch", "triton", "numpy", "scipy", "transformers", "matplotlib")
_FAMILIES = {"triton": "portable kernels", "hopper": "kernels for Hopper", "blockwise": "PyTorch over live tiles"}
_SHAPE = (1, 1, 4096, 64)  # of the call that the kernels are asked about


def gathered() -> dict[str, Any]:
    """All of it, as JSON values."""
    return {"versions": versions(), "devices": devices(), "launcher": native.served_by(), "caches": caches()}


def versions() -> dict[str, str | None]:
    """The versions of everything that results may depend on; None if not installed."""
    found: dict[str, str | None] = {"sparseflash": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    # The wheels of PyPI leave the build, +cu130, out of the distribution's version.
    return found | {"torch": torch.__version__, "cuda": torch.version.cuda}


def devices() -> list[dict[str, Any]]:
    """The CPU and every GPU that PyTorch sees, with the reason of each backend that cannot run there."""
    found: list[dict[str, Any]] = [
        {"device": "cpu", "name": f"{platform.machine()}, {threads()}", "backends": usable("cpu")[0]}
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        backends, untested = usable(f"cuda:{index}")
        found.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "capability": [properties.major, properties.minor],
                "memory_bytes": properties.total_memory,
                "backends": backends,
                "versions": untested,
            }
        )
    return found


def usable(device: str) -> tuple[dict[str, str | None], str | None]:
    """For each backend, why it cannot run on the device; None if it can. The kernels are asked for bf16 with D = 64.

    The second value is the note of `explain` on the Hopper kernels if they were not measured with the installed Triton.
    They are then checked on the device.
    """
    gpu = device != "cpu"
    q = torch.zeros(_SHAPE if gpu else (1, 1, 16, 16), device=device, dtype=torch.bfloat16 if gpu else torch.float32)
    mask = masks.causal(q.shape[2]).to(q.device)
    found: dict[str, str | None] = {}
    versions = None
    for backend in ("triton", "hopper", "blockwise"):
        try:
            if gpu:
                versions = explain(q, q, q, mask, backend=backend).versions or versions
            else:
                attention(q, q, q, mask, backend=backend)
            found[backend] = None
        except (RuntimeError, ValueError, TypeError, ImportError) as error:
            found[backend] = str(error)
    return found, versions


def caches() -> list[dict[str, Any]]:
    """Compiled code on disk, which other programs may share; the library itself keeps its caches in memory."""
    folders = {
        "Triton's kernels": os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache",
        "torch.compile's code": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or _of_inductor(),
    }
    found = []
    for name, folder in folders.items():
        files = [file for file in Path(folder).rglob("*") if file.is_file()]
        found.append(
            {"name": name, "folder": str(folder), "files": len(files), "bytes": sum(f.stat().st_size for f in files)}
        )
    return found


def _of_inductor() -> Path:
    import getpass
    import re

    return Path(gettempdir()) / ("torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser()))


def lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The same as labels and texts, for a terminal."""
    said = [(name, shown or "not installed") for name, shown in found["versions"].items() if name != "cuda"]
    said.append(("cuda", found["versions"]["cuda"] or "not in this build of torch"))
    for device in found["devices"]:
        more = ""
        if "capability" in device:
            major, minor = device["capability"]
            more = f", compute capability {major}.{minor}, {device['memory_bytes'] / 2**30:.0f} GiB"
        said.append((device["device"], device["name"] + more))
        before = None
        for backend, why in device["backends"].items():
            answer = "usable" if why is None else f"not usable: {why if why != before else 'for the same reason'}"
            said.append((f"  {backend}", f"{_FAMILIES[backend]}: {answer}"))
            before = why
        if device.get("versions"):
            said.append(("  versions", device["versions"]))
    said.append(("kernels started by", found["launcher"]))
    for cache in found["caches"]:
        said.append((cache["name"], f"{cache['bytes'] / 2**20:.1f} MiB in {cache['files']} files, {cache['folder']}"))
    return said
