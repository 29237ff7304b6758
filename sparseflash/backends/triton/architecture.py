"""Everything that depends on a compute capability."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from sparseflash.blockmask.cache import bounded

if TYPE_CHECKING:
    from sparseflash.backends.triton.configs import Tables

# The oldest compute capability that the kernels support: Ampere, the first with bf16 and asynchronous copies.
_OLDEST = (8, 0)
_KIB = 1024
_LEAST = 99 * _KIB
# Bytes of shared memory that a program may use. For others, the least of any GPU since Ampere.
_SHARED_MEMORY = {
    (8, 0): 163 * _KIB, (8, 6): _LEAST, (8, 7): 163 * _KIB, (8, 9): _LEAST, (9, 0): 227 * _KIB, (10, 0): 227 * _KIB,
    (10, 3): 227 * _KIB,
}  # fmt: skip
# The generations whose matrix instructions read operands from shared memory: wgmma on Hopper, tcgen05 on Blackwell.
_HOPPER, _BLACKWELL = 9, 10


@dataclass(frozen=True)
class Architecture:
    """What the kernels need to know about GPUs of one compute capability.

    >>> architecture_of((9, 0)).has_wgmma, architecture_of((10, 0)).has_wgmma
    (True, False)
    """

    capability: tuple[int, int]
    shared_memory: int  # bytes that a program may use
    is_supported: bool  # some kernels run there
    has_tma: bool  # the copy engine, which loads tiles by descriptors
    has_wgmma: bool  # the matrix instruction of the Hopper kernels
    # Matrix instructions read tiles of 64 rows and more from shared memory; smaller ones are multiplied from registers.
    reads_shared: bool
    # Tiles of queries, keys and values need the same layout in shared memory: see `portable.fitting.padded_dims`.
    needs_one_layout: bool
    # The correction for truncated sums was fitted on these tensor cores: see `device_functions/fp32_split.py`.
    corrects_sums: bool

    @cached_property
    def tables(self) -> Tables:
        # Imported late: they depend on the version of Triton, and this module must be importable without Triton.
        from sparseflash.backends.triton import configs

        if self.capability == (8, 0):
            return configs.AMPERE
        of_generation = {_HOPPER: configs.HOPPER, _BLACKWELL: configs.BLACKWELL}
        return of_generation.get(self.capability[0], configs.CONSUMER)


@bounded(maxsize=64)
def architecture_of(capability: tuple[int, int]) -> Architecture:
    """The architecture of a compute capability.

    >>> [architecture_of(each).shared_memory for each in ((9, 0), (8, 9), (12, 0))]
    [232448, 101376, 101376]
    """
    generation = capability[0]
    return Architecture(
        capability, _SHARED_MEMORY.get(capability, _LEAST), is_supported=capability >= _OLDEST,
        has_tma=generation >= _HOPPER, has_wgmma=generation == _HOPPER,
        reads_shared=generation in (_HOPPER, _BLACKWELL), needs_one_layout=generation == _HOPPER,
        corrects_sums=capability == (9, 0),
    )  # fmt: skip


def multiprocessors(device: torch.device) -> int:
    """The multiprocessors of a GPU, of an H100 if the device is none."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
