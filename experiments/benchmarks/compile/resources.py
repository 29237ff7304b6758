"""The report of ptxas on a compiled kernel, and its machine code."""

from __future__ import annotations

import io
import re
import subprocess
import tempfile
from contextlib import redirect_stdout
from typing import Any, NamedTuple

from triton import knobs
from triton.compiler.compiler import make_backend


class Said(NamedTuple):
    registers: int  # per thread
    spilled: int  # bytes a thread
    # Warnings that matrix instructions are not asynchronous.
    serialised: tuple[str, ...]


def said_by_ptxas(kernel: Any) -> tuple[Said, bytes]:
    """Triton keeps no report, so the kernel is assembled again."""
    made_by = kernel.metadata
    backend = make_backend(made_by.target)
    with knobs.nvidia.scope(), redirect_stdout(io.StringIO()) as output:
        knobs.nvidia.dump_ptxas_log = True
        cubin = backend.make_cubin(kernel.asm["ptx"], {}, made_by, made_by.target.arch)
    log = output.getvalue()
    registers, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    if registers is None or spilled is None:
        raise RuntimeError(f"ptxas did not say what the kernel uses: {log}")
    return Said(int(registers[1]), int(spilled[1]), tuple(re.findall(r"\(C75\d\d\)[^\n]*", log))), cubin


def disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "--print-code", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
