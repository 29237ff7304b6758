"""Compiles a kernel, edits a device function that it is handed, and compiles it again with the same cache on disk.

    python -m tests.backends.triton.edited_change [--without-key]

Prints whether the machine code is the same: for the same function, for an edited one, and for another fact.
"""

import importlib.util
import linecache
import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from experiments.benchmarks.compile.without_gpu import NoDevice
from sparseflash.backends.triton.changes.kind import Changes, Functions


class WithoutKey(Changes):
    cache_key = property(lambda self: "no key", lambda self, value: None)


def apply(folder, body):
    path = Path(folder, "a_change.py")
    path.write_text(f"import triton\n\n@triton.jit\ndef apply(x):\n    return {body}\n")
    spec = importlib.util.spec_from_file_location("a_change", path)
    made = importlib.util.module_from_spec(spec)
    sys.modules["a_change"] = made
    spec.loader.exec_module(made)
    linecache.clearcache()
    return made.apply


def ptx(folder, body, fact, kind):
    @triton.jit
    def kernel(x_ptr, CHANGES: tl.constexpr):
        x = tl.load(x_ptr + tl.arange(0, 128))
        for i in tl.static_range(len(CHANGES.kinds)):
            x = CHANGES.kinds[i].apply(x) + CHANGES.kinds[i].FACT
        tl.store(x_ptr + tl.arange(0, 128), x)

    changes = kind([Functions({"apply": apply(folder, body)}, {"FACT": fact}, 0)])
    with mock.patch.object(driver, "_active", NoDevice(90)):
        return kernel.warmup(torch.empty(128), changes, grid=(1, 1, 1)).asm["ptx"]


def main():
    kind = WithoutKey if "--without-key" in sys.argv else Changes
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder):
        first = ptx(folder, "x + 2.0", 1, kind)
        others = [ptx(folder, *each, kind) for each in (("x + 2.0", 1), ("x * 2.0", 1), ("x + 2.0", 2))]
    print(*(first == other for other in others))


if __name__ == "__main__":
    main()
