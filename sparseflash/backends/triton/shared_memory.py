"""The shared memory of a program, by compute capability."""

from __future__ import annotations

_KIB = 1024
_LEAST = 99 * _KIB
_MOST = {80: 163 * _KIB, 86: _LEAST, 87: 163 * _KIB, 89: _LEAST, 90: 227 * _KIB, 100: 227 * _KIB, 103: 227 * _KIB}


def shared_memory(arch: int) -> int:
    """Bytes of shared memory that a program may use on GPUs of a compute capability; `arch` is 90 for 9.0.

    >>> shared_memory(90), shared_memory(89), shared_memory(120)
    (232448, 101376, 101376)

    For capabilities that are not listed, the smallest amount of any GPU since Ampere.
    """
    return _MOST.get(arch, _LEAST)
