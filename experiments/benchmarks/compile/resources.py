"""The report of ptxas on a compiled kernel, and its machine code."""

from __future__ import annotations

import io
import re
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any, NamedTuple

from triton import knobs
from triton.backends.nvidia.compiler import sm_arch_from_capability
from triton.compiler.compiler import make_backend

_INSTRUCTION = 16  # bytes


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


def disassembled(cubins: Sequence[bytes], arch: int) -> list[list[str]]:
    """The instructions of each, a line `/*address*/ instruction;` for each, with addresses counted through all of them.

    In one run of nvdisasm, which takes 0.7 s to begin and 0.1 s for a kernel.
    """
    codes = [_code_of(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        target = sm_arch_from_capability(arch).replace("sm_", "SM")
        command = [knobs.nvidia.nvdisasm.path, "--binary", target, file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = iter(re.findall(r"^ *(/\*[0-9a-f]{4,}\*/.*;)", printed, re.MULTILINE))
    return [[next(lines) for _ in range(len(code) // _INSTRUCTION)] for code in codes]


def _code_of(cubin: bytes) -> bytes:
    """The section `.text.NAME` of an ELF file with one kernel."""
    (at,), (size, count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, at + size * number) for number in range(count)]
    texts = sections[names][4]
    ((_, _, _, _, begin, length),) = (each for each in sections if cubin.startswith(b".text.", texts + each[0]))
    return cubin[begin : begin + length]
