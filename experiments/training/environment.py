from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

import sparseflash

# The columns that identify a run. `run` is its start time.
FACTS = (
    "run", "device", "driver", "cuDNN", "torch", "triton", "flash-attn-4", "python", "date", "commit", "command",
)  # fmt: skip
NONE = "-"
NOT_INSTALLED = "not installed"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"


def peak_memory(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": str(torch.__version__),
        "sparseflash": sparseflash.__version__,
        "triton": triton_version(missing="none"),
    }


def command_line(module: str, *, program: Sequence[str] = ("python",), without: Sequence[str] = ("--out",)) -> str:
    """The command that runs `python -m module` with the arguments of this process.

    without: options with a folder of this machine, to leave out.
    """
    return shlex.join([*program, "-m", module, *_without(sys.argv[1:], without)])


def _without(words: Sequence[str], options: Sequence[str]) -> Iterator[str]:
    rest = iter(words)
    for word in rest:
        if word in options:
            next(rest, None)
        elif word.partition("=")[0] not in options:
            yield word


def environment(device: torch.device, command: str, commit: str | None) -> dict[str, str]:
    name, driver, cudnn = "CPU", NONE, NONE
    if device.type == "cuda":
        name, cudnn = torch.cuda.get_device_name(device), str(torch.backends.cudnn.version())
        driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        driver = driver.splitlines()[0] if driver else "not known"
    now = datetime.now(timezone.utc)
    values = (
        now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"), name, driver, cudnn, torch.__version__,
        triton_version(), installed_version("flash-attn-4"), platform.python_version(),
        now.strftime("%Y-%m-%d %H:%M UTC"), _commit() if commit is None else commit, command,
    )  # fmt: skip
    return dict(zip(FACTS, values, strict=True))


def in_a_line(facts: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _output_of(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def triton_version(missing: str = NOT_INSTALLED) -> str:
    try:
        import triton
    except ModuleNotFoundError:
        return missing
    return str(triton.__version__)


def installed_version(package: str, missing: str = NOT_INSTALLED) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return missing


def _commit() -> str:
    commit = _output_of("git", "rev-parse", "--short", "HEAD")
    if not commit:
        return "not known"
    return f"{commit} with changes" if _output_of("git", "status", "--porcelain") else commit
