"""What a compiled kernel uses: the report of ptxas, and the instruction counts of its machine code."""

from __future__ import annotations

import io
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any, NamedTuple

from triton import knobs
from triton.compiler.compiler import make_backend

# "/*0a40*/  @!P0 HGMMA.64x64x16.F32.BF16 R24, ... ;": the address, perhaps a predicate, the name before the first dot.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)


class Said(NamedTuple):
    """The report of ptxas on a kernel."""

    registers: int  # per thread
    spilled: int  # bytes that a thread writes to memory for lack of registers
    # The warnings of ptxas that it could not keep the matrix instructions of Hopper asynchronous.
    serialised: tuple[str, ...]


class Resources(NamedTuple):
    """What one kernel uses."""

    said: Said
    shared: int  # bytes of shared memory per program
    instructions: int
    opcodes: Mapping[str, int]  # how often each instruction occurs, by its name before the first dot
    sass: str  # the machine code


def resources_of(kernel: Any) -> Resources:
    """What a kernel that Triton has compiled uses, with its whole machine code.

    Triton's own `asm["sass"]` is not used, because Triton 3.6 truncates it after 4,096 instructions.
    """
    said, cubin = said_by_ptxas(kernel)
    sass = disassembled(cubin)
    opcodes = opcodes_of(sass)
    return Resources(said, kernel.metadata.shared, opcodes.total(), opcodes, sass)


def said_by_ptxas(kernel: Any) -> tuple[Said, bytes]:
    """The report of ptxas on a kernel that Triton has compiled, and the machine code.

    The kernel is assembled again with the options that Triton gives ptxas, because Triton does not keep the report.
    """
    made_by = kernel.metadata  # the options that the kernel was compiled with
    backend = make_backend(made_by.target)
    with knobs.nvidia.scope(), redirect_stdout(io.StringIO()) as output:
        knobs.nvidia.dump_ptxas_log = True
        cubin = backend.make_cubin(kernel.asm["ptx"], {}, made_by, made_by.target.arch)
    log = output.getvalue()
    registers, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    if registers is None or spilled is None:
        raise RuntimeError(f"ptxas did not say what the kernel uses: {log}")
    return Said(int(registers[1]), int(spilled[1]), tuple(re.findall(r"\(C75\d\d\)[^\n]*", log))), cubin


def opcodes_of(sass: str) -> Counter[str]:
    """How often each instruction occurs in machine code, by its name before the first dot.

    >>> dict(opcodes_of("  /*0000*/  LDC R1, c[0x0][0x28] ;\\n  /*0010*/  @!UP0 LOP3.LUT R2, R2, 0x1f, RZ ;"))
    {'LDC': 1, 'LOP3': 1}
    """
    return Counter(_INSTRUCTION.findall(sass))


def disassembled(cubin: bytes) -> str:
    """The whole machine code of a kernel, as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "--print-code", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
