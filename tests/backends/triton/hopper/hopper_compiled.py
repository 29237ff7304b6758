"""Compiles the Hopper kernels as launches would, without a GPU, and prints the reports of each call as JSON.

    python -m tests.backends.triton.hopper.hopper_compiled "DIM DTYPE [FEATURE...]"...

DIM: of all tensors, or D/Dv, as 192/128.

Needs a process in which Triton compiles. Kernels that calls share are looked at once.
"""

import json
import re
import sys
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import torch
from triton import knobs

from experiments.benchmarks.compile.hopper import ARCH, compiled
from experiments.benchmarks.compile.report import has_two_layouts
from experiments.benchmarks.compile.resources import disassembled, said_by_ptxas
from experiments.benchmarks.compile.without_gpu import stop_at_ptx
from sparseflash.backends.triton.direct_start import parameters_of_compiled
from sparseflash.backends.triton.hopper import passes
from sparseflash.backends.triton.hopper.configs import WIDEST_BACKWARD, is_common


def compiled_for(dims, dtype, features):
    forward, backward = passes.forward, passes.backward

    def of_values(x):
        return x.new_empty(*x.shape[:3], dims[1])

    def with_values(setting, key, q, k, v, *more):
        return forward(setting, key, q, k, of_values(v), *more)

    def gradients(setting, key, q, k, v, out, dout, *more, **how):
        if max(dims) > WIDEST_BACKWARD and not {"softcap", "alibi"}.isdisjoint(features):
            return SimpleNamespace(launches=lambda: [])
        return backward(setting, key, q, k, *map(of_values, (v, out, dout)), *more, **how)

    with mock.patch.object(knobs.runtime, "add_stages_inspection_hook", stop_at_ptx), ExitStack() as stack:
        if not is_common(dims):
            stack.enter_context(mock.patch.object(passes, "forward", with_values))
            stack.enter_context(mock.patch.object(passes, "backward", gradients))
        return compiled(dims[0], dtype, features)


def reports(asked):
    found = []
    for dim, dtype, *features in map(str.split, asked):
        dims = [int(each) for each in dim.split("/")]
        found.append(compiled_for((dims[0], dims[-1]), getattr(torch, dtype), features))
    kernels = {kernel.hash: (kernel, names) for call in found for kernel, names in call.values()}
    assembled = {key: said_by_ptxas(kernel) for key, (kernel, _) in kernels.items()}
    multiplying = [key for key, (kernel, _) in kernels.items() if products_of(kernel)]
    sass = dict(zip(multiplying, disassembled([assembled[key][1] for key in multiplying], ARCH), strict=True))
    made = {key: report(*kernels[key], assembled[key][0], sass.get(key, [])) for key in kernels}
    return [{name: made[kernel.hash] for name, (kernel, _) in call.items()} for call in found]


def products_of(kernel):
    return kernel.asm["ptx"].count("wgmma.mma_async")


def report(kernel, names, said, lines):
    sass = "\n".join(lines)
    return {
        "spilled": said.spilled,
        "spilled_in_loop": spilled_among_products(lines),
        "spilled_in_steps": spilled_in_steps(lines),
        "warnings": said.serialised,
        "shared": kernel.metadata.shared,
        "products": products_of(kernel),
        "two_layouts": has_two_layouts(kernel.asm["ptx"]),
        "exponentials": exponentials_under_products(lines),
        "kept_predicates": len(re.findall(r"\b(?:PLOP3|P2R)\b", sass)),
        "predicated": len(re.findall(r"@!?U?P\d+ (?:FSEL|FMUL R\d+, R\d+, R)", sass)),
        "weights": stores_of_weights(kernel.asm["ptx"]),
        "direct": parameters_of_compiled(kernel, names) is not None,
        "resident": kernel.metadata.launch_cooperative_grid,
    }


def spilled_among_products(lines):
    products = [number for number, line in enumerate(lines) if "HGMMA" in line]
    among = lines[products[0] : products[-1]] if products else []
    return sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in among)


def spilled_in_steps(lines):
    places = {int(re.match(r"/\*(\w+)", line)[1], 16): i for i, line in enumerate(lines)}
    branches = [(i, found) for i, line in enumerate(lines) if (found := re.search(r"\bBRA (0x\w+)", line))]
    loops = [(begin, i) for i, found in branches if (begin := places[int(found[1], 16)]) < i]
    steps = []
    # Code that waits once more stands at the end, and branches back into a loop: a longer loop that overlaps it.
    for a, b in sorted(loops, key=lambda loop: loop[1] - loop[0]):
        if any("HGMMA" in line for line in lines[a:b]) and all(b < c or d < a for c, d in steps):
            steps.append((a, b))
    return sum(bool(re.search(r"\b(LDL|STL)\b", line)) for a, b in steps for line in lines[a:b])


def exponentials_under_products(lines):
    """How many exponentials run under the products of one or two pieces of values."""
    found, count = [], None
    for line in lines:
        if "WARPGROUP.DEPBAR.LE gsb0" in line:
            if count is not None:
                found.append(count)
            count = 0 if re.search("gsb0, 0x[12]", line) else None
        elif "MUFU.EX2" in line and count is not None:
            count += 1
    return found


def stores_of_weights(ptx):
    names = {"stmatrix": "s", "fence.proxy.async": "f", "wgmma.mma_async": "p", "bar.sync 0, 256;": "b"}
    found = re.findall(r"stmatrix|fence\.proxy\.async|wgmma\.mma_async|bar\.sync\s+0, 256;", ptx)
    order = "".join(names[re.sub(r"\s+", " ", each)] for each in found)
    return len(re.findall("s+", order)), len(re.findall("s+fbp", order))


if __name__ == "__main__":
    print(json.dumps(reports(sys.argv[1:])))
