"""Compiles the kernels for Hopper as launches would, without a GPU, and says as JSON what came of it.

    python -m tests.backends.triton.hopper.hopper_compiled DIM DTYPE [FEATURE...]

Features: those of experiments.benchmarks.compile.hopper.

Needs a process in which Triton compiles. With another Triton first in PYTHONPATH it says what that makes of them.
"""

import json
import re
import sys

import torch

from experiments.benchmarks.compile.hopper import compiled
from experiments.benchmarks.compile.report import has_two_layouts
from experiments.benchmarks.compile.resources import disassembled, said_by_ptxas
from sparseflash.backends.triton.direct_start import parameters_of_compiled


def report(kernel, names):
    said, cubin = said_by_ptxas(kernel)
    products = kernel.asm["ptx"].count("wgmma.mma_async")
    sass = disassembled(cubin) if products else ""
    return {
        "spilled": said.spilled,
        "spilled_in_loop": spilled_among_products(sass),
        "warnings": said.serialised,
        "shared": kernel.metadata.shared,
        "products": products,
        "two_layouts": has_two_layouts(kernel.asm["ptx"]),
        "exponentials": exponentials_under_products(sass),
        "kept_predicates": len(re.findall(r"\b(?:PLOP3|P2R)\b", sass)),
        "predicated": len(re.findall(r"@!?U?P\d+ (?:FSEL|FMUL R\d+, R\d+, R)", sass)),
        "direct": parameters_of_compiled(kernel, names) is not None,
        "resident": kernel.metadata.launch_cooperative_grid,
    }


def spilled_among_products(sass):
    """How many loads and stores of spilled registers stand between the first product and the last."""
    lines = sass.splitlines()
    products = [number for number, line in enumerate(lines) if "HGMMA" in line]
    among = lines[products[0] : products[-1]] if products else []
    return sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in among)


def exponentials_under_products(sass):
    """How many stand between a wait for all products but one and the next wait: while that one is computed."""
    found, count = [], None
    for line in sass.splitlines():
        if "WARPGROUP.DEPBAR.LE gsb0" in line:
            if count is not None:
                found.append(count)
            count = 0 if "gsb0, 0x1" in line else None
        elif "MUFU.EX2" in line and count is not None:
            count += 1
    return found


if __name__ == "__main__":
    dim, dtype, *features = sys.argv[1:]
    kernels = compiled(int(dim), getattr(torch, dtype), features)
    print(json.dumps({name: report(*kernels[name]) for name in kernels}))
