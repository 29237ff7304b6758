"""Compiles the kernels for Hopper as launches would, without a GPU, and says as JSON what came of it.

    python -m tests.backends.triton.hopper.hopper_compiled DIM DTYPE [FEATURE...]

Features: small, lengths, parts, softcap, alibi, log, sink, table, key_bias, bias, tile_bias, learned, dead.

Needs a process in which Triton compiles. With another Triton first in PYTHONPATH it says what that makes of them.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver

from sparseflash import BlockMask, masks, scores
from sparseflash.backends.problem import Problem
from sparseflash.backends.triton import api
from sparseflash.backends.triton.direct_start import parameters_of_compiled
from sparseflash.backends.triton.hopper import cuts, passes, plan
from sparseflash.scores.change import PAIRS, Scores, Sizes

ARCH = 90
CHANGES = {
    "softcap": scores.softcap(30.0), "alibi": scores.alibi(torch.ones(2)), "log": scores.log_decay(torch.ones(2)),
    "sink": scores.sink(torch.ones(2)), "table": scores.relative(torch.ones(2, 32), scores.t5_buckets()),
    "key_bias": scores.key_bias(torch.ones(1, 2, 512)),
}  # fmt: skip


class _NoDevice:
    """Stands in for the CUDA driver: answers what a compilation asks."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", ARCH, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")


def compiled(dim, dtype, small, lengths, parts, kinds=(), *, learned=False, dead=False):
    """What the two passes launch: `{name: (compiled kernel, names of its arguments)}`.

    small: the mask has blocks of 64, which the forward walks as they are. parts: the forward cuts rows, and the
    backward columns. kinds: of CHANGES or PAIRS. learned: their tensors get gradients. dead: some
    tiles are.
    """
    q = torch.empty(1, 2, 512, dim, dtype=dtype)
    mask = (masks.causal if dead else BlockMask.dense)(512, block=64 if small else 128)
    block = mask.block_q, mask.block_k
    if lengths:
        mask = mask.with_lengths([100])
    rule = plan.Rule(far=0.0, chunk=1, worth=1.0) if parts else plan.RULE
    cut = cuts.Rule(far=0, worth=0, shortest=1) if parts else cuts.RULE
    with (
        mock.patch.object(plan, "RULE", rule),
        mock.patch.object(cuts, "RULE", cut),
        mock.patch.object(driver, "_active", _NoDevice()),
    ):
        setting = api.setting_of(q, q, Problem.of(mask, scale=1.0), (9, 0))
        made = CHANGES | {
            "bias": scores.bias(torch.ones(1, 2, 512, 512, dtype=dtype)),  # which the kernels read as it is
            "tile_bias": scores.tile_bias(torch.ones(1, 2, len(mask.indices), *block, dtype=dtype), mask),
        }  # fmt: skip
        changes = sum((made[kind] for kind in kinds), Scores(())) if kinds else None
        if changes is not None:
            changes = changes.prepared(Sizes(1, 2, 512, 512, q.device, mask))
        wanted = [learned for _ in changes.tensors()] if kinds else []
        both = (
            passes.forward(setting, "", q, q, q, 1.0, 0, changes),
            passes.backward(setting, "", q, q, q, q, q, 1.0, 0, dlse=False, changes=changes, wanted=wanted),
        )
        found = {}
        for launch in (each for run in both for each in run.launches()):
            variant = launch.launch.variant
            found[variant.function.__name__] = launch.compiled(), variant.names
    return found


def report(kernel, names):
    said = ptxas(kernel.asm["ptx"])
    products = kernel.asm["ptx"].count("wgmma.mma_async")
    sass = kernel.asm["sass"] if products else ""  # disassembled when asked for, in a third of a second
    return {
        "spilled": int(re.search(r"(\d+) bytes spill stores", said)[1]),
        "spilled_in_loop": spilled_among_products(sass),
        "warnings": re.findall(r"\(C75\d\d\)[^\n]*", said),
        "shared": kernel.metadata.shared,
        "products": products,
        "two_layouts": has_two_layouts(kernel.asm["ptx"]),
        "exponentials": exponentials_under_products(sass),
        "kept_predicates": len(re.findall(r"\b(?:PLOP3|P2R)\b", sass)),
        "predicated": len(re.findall(r"@!?U?P\d+ (?:FSEL|FMUL R\d+, R\d+, R)", sass)),
        "direct": parameters_of_compiled(kernel, names) is not None,
        "resident": kernel.metadata.launch_cooperative_grid,
    }


def has_two_layouts(ptx):
    """Whether tiles that matrix instructions read under different layouts take turns at one address, which ptxas 12.8
    gets wrong. A descriptor is the address, in 14 bits, and the layout, in the upper half of 64."""
    layouts = {}
    for address, number in re.findall(r"(?:or|add)\.[bs]64\s+%rd\d+, (%rd\d+), (-?\d+);", ptx):
        layout = int(number) % 2**64 >> 32
        if layout >> 30 and not layout & 0x3FFFFF00:  # one of three shuffles, and a stride below 256 x 16 bytes
            layouts.setdefault(address, set()).add(layout)
    return any(len(each) > 1 for each in layouts.values())


def ptxas(ptx):
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "kernel.ptx"
        path.write_text(ptx)
        command = [get_ptxas(ARCH).path, "-v", "--gpu-name", "sm_90a", str(path), "-o", str(path.with_suffix(".cubin"))]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


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
    kinds = [each for each in features if each in (*CHANGES, *PAIRS)]
    sizes = ("small" in features, "lengths" in features, "parts" in features)
    kernels = compiled(
        int(dim), getattr(torch, dtype), *sizes, kinds, learned="learned" in features, dead="dead" in features
    )
    print(json.dumps({name: report(*kernels[name]) for name in kernels}))
