"""Whether kernels fit in shared memory; compiles them, without a GPU, until the compiler has allocated it."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from triton import knobs
from triton._C.libtriton import llvm, nvidia

from experiments.benchmarks.compile.report import both_passes, problem_of
from experiments.benchmarks.compile.without_gpu import compiling_for
from experiments.training.atomic_files import write_csv
from sparseflash.backends.triton.architecture import architecture_of
from sparseflash.backends.triton.launcher import BoundLaunch
from sparseflash.backends.triton.overrides import override
from tests.fitting.cases import Case

TENSOR_MEMORY = 512  # columns that a program may use on GPUs of compute capability 10.0


@dataclass(frozen=True)
class Fit:
    arch: int
    case: str
    kernel: str
    config: str  # the tiles, warps and stages that were chosen
    stages: int  # compiled with
    shared: int  # bytes
    tensor_memory: int  # columns

    @property
    def fits(self) -> bool:
        return (
            self.shared <= architecture_of(divmod(self.arch, 10)).shared_memory and self.tensor_memory <= TENSOR_MEMORY
        )

    @property
    def has_fewer_stages(self) -> bool:
        return self.stages < int(self.config.split("x")[3].rstrip("q"))


def read(path: Path) -> list[Fit]:
    if not path.exists():
        return []
    with path.open() as file:
        rows = list(csv.DictReader(file))
    numbers = ("arch", "stages", "shared", "tensor_memory")
    return [Fit(**{name: int(x) if name in numbers else x for name, x in row.items()}) for row in rows]


def write(path: Path, fits: Sequence[Fit]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_csv(path, [asdict(fit) for fit in sorted(fits, key=lambda fit: (fit.arch, fit.case, fit.kernel))])


def fits_of(case: Case) -> list[Fit]:
    found = []
    with override(**case.overrides()), compiling_for(case.arch), _allocating_only():
        for kernel, config, launch in _launches(case):
            metadata = launch.compiled().metadata
            stages = launch.launch.variant.options["num_stages"]
            memory = metadata.tmem_size or 0
            found.append(Fit(case.arch, str(case), kernel, config, stages, metadata.shared, memory))
    return found


def _launches(case: Case) -> Iterator[tuple[str, str, BoundLaunch]]:
    mask = case.mask()
    problem = problem_of(mask, case.dims[0], lengths=case.lengths, dropout=case.dropout)
    _, forward, backward, _ = both_passes(
        case.arch, case.arithmetic, case.dims, mask, problem, case.changes(mask), case.learned
    )
    kernels = {
        "forward": forward.kernel, "dq, for delta": backward.means, "dq": backward.queries, "dk_dv": backward.keys,
    }  # fmt: skip
    for name, bound in kernels.items():
        if bound is not None:
            yield name, str(bound.choice.config), bound.launch


class _Allocated(Exception):
    """Ends a compilation early."""


@contextmanager
def _allocating_only() -> Iterator[None]:
    """Inside, Triton stops after it has allocated shared memory, in half of the time."""

    def stop(*module: Any) -> Any:
        raise _Allocated

    def hook(*given: Any) -> tuple[str, str] | None:
        if not given:
            return "allocated", "allocated"
        stages = given[1]
        lower = stages["llir"]

        def allocate(module: Any, metadata: dict[str, Any]) -> str:
            try:
                lower(module, metadata)
            except _Allocated:
                metadata["shared"] = module.get_int_attr("ttg.shared")
                metadata["tmem_size"] = module.get_int_attr("ttg.tensor_memory_size")
                for scratch in ("global", "profile"):
                    metadata |= {f"{scratch}_scratch_size": 0, f"{scratch}_scratch_align": 1}
                return ""
            raise RuntimeError("the compiler must make LLVM's module after it has allocated shared memory; it did not")

        stages |= {"llir": allocate, "ptx": _nothing, "cubin": lambda source, metadata: b""}
        return None

    with (
        knobs.compilation.scope(),
        mock.patch.object(knobs.runtime, "add_stages_inspection_hook", hook),
        mock.patch.object(nvidia.passes.ttgpuir, "add_to_llvmir", lambda *given: None),
        mock.patch.object(llvm, "to_module", stop),
    ):
        knobs.compilation.disable_line_info = True
        yield


def _nothing(source: str, metadata: dict[str, Any]) -> str:
    metadata["name"] = "allocated"
    return ""
