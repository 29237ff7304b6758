"""Keeps tensors alive for as long as a CUDA graph may read them.

A graph records addresses. PyTorch reserves memory for the tensors that the graph itself makes, and the user keeps its
inputs alive. Plans and other cached tensors may be dropped while the graph still reads their memory. CUDA's answer is a
user object: the graph retains it, and its destructor runs when the graph and all its executable copies have been
destroyed. The destructor may run on any thread and must not call CUDA, so it is the C library's `sem_post` here, on a
semaphore that `release_finished` polls.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from torch import Tensor

from sparseflash.cuda_driver import cuda_driver, raise_if_failed

_NO_DESTRUCTOR_SYNC = 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC: the destructor may run asynchronously (required)
_MOVE = 1  # CU_GRAPH_USER_OBJECT_MOVE: the graph takes over our reference
_DOING = "to keep memory for a graph that is being recorded"
_SEMAPHORE_BYTES = 32  # sizeof(sem_t) on 64-bit Linux


class _Kept:
    """The tensors that one graph reads, and the semaphore that is posted when the graph is destroyed."""

    def __init__(self) -> None:
        # Not Python's memory, which is freed at process exit, perhaps before the last graph is destroyed.
        self.semaphore = ctypes.c_void_p(_libc().malloc(_SEMAPHORE_BYTES))
        _libc().sem_init(self.semaphore, 0, 0)
        self.tensors: dict[int, Tensor] = {}

    def is_released(self) -> bool:
        """Whether the graph has been destroyed. Returns True only once, and then frees the semaphore."""
        if _libc().sem_trywait(self.semaphore) != 0:
            return False
        _libc().free(self.semaphore)
        return True


_graphs: dict[int, _Kept] = {}  # by CUDA's id of the capture


def keep_for_graph(stream: int, tensors: list[Tensor]) -> None:
    """Keeps tensors alive until the graph that this stream (a raw handle) is recording has been destroyed.

    Raises RuntimeError if the driver refuses.
    """
    release_finished()
    number, graph = _capture_of(stream)
    kept = _graphs.get(number)
    if kept is None:
        kept = _Kept()
        _retain(graph, kept)
        _graphs[number] = kept
    kept.tensors |= {id(tensor): tensor for tensor in tensors}


def release_finished() -> None:
    """Releases the tensors of graphs that have been destroyed."""
    for number, kept in list(_graphs.items()):
        if kept.is_released():
            del _graphs[number]


def _capture_of(stream: int) -> tuple[int, ctypes.c_void_p]:
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    asked = ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph)
    driver = cuda_driver()
    if hasattr(driver, "cuStreamGetCaptureInfo_v2"):
        result = driver.cuStreamGetCaptureInfo_v2(*asked, None, None)
    else:  # v3 also returns edge data
        result = driver.cuStreamGetCaptureInfo_v3(*asked, None, None, None)
    raise_if_failed(result, _DOING)
    return number.value, graph


def _retain(graph: ctypes.c_void_p, kept: _Kept) -> None:
    user_object, post = ctypes.c_void_p(), ctypes.cast(_libc().sem_post, ctypes.c_void_p)
    made = ctypes.byref(user_object), kept.semaphore, post, 1, _NO_DESTRUCTOR_SYNC
    raise_if_failed(cuda_driver().cuUserObjectCreate(*made), _DOING)
    raise_if_failed(cuda_driver().cuGraphRetainUserObject(graph, user_object, 1, _MOVE), _DOING)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    return libc
