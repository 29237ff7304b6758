"""A few processes, joined by gloo or on GPUs by NCCL, that are started once and run functions of tests.

    with Processes(4) as pool:
        pool.run(3, function, *arguments)  # function(group, *arguments) in three of them: their results

A function must be in a module that the processes can import. The group's `kept` holds data for later calls.
"""

import contextlib
import io
import multiprocessing
import tempfile
import traceback
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch

from tests.interpreting import interpret_quickly
from tests.processes.forked import interpreting
from tests.processes.frame_stack import in_one_piece

TIMEOUT = 60


@dataclass
class Member:
    group: object
    rank: int
    ranks: int
    device: torch.device
    kept: dict = field(default_factory=dict)


class Failed(Exception):
    def __init__(self, kind, message, trace):
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind, self.message = kind, message


class Processes:
    def __init__(self, count, timeout=TIMEOUT, backend="gloo"):
        self.folder = tempfile.TemporaryDirectory()
        pairs = [multiprocessing.Pipe() for _ in range(count)]
        self.pipes = [ours for ours, _ in pairs]
        store = f"file://{self.folder.name}/store"
        start = _spawned if backend == "nccl" else interpreting().start  # no CUDA before a fork
        self.processes = [
            start(_serve, (theirs, store, rank, count, timeout, backend)) for rank, (_, theirs) in enumerate(pairs)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()

    def each(self, ranks, function, arguments):
        for pipe, some in zip(self.pipes[:ranks], arguments, strict=True):
            self.send(pipe, ranks, function, some)
        return [self.receive(pipe) for pipe in self.pipes[:ranks]]

    def send(self, pipe, ranks, function, arguments):
        pipe.send((ranks, function, _bytes(arguments)))

    def receive(self, pipe):
        ok, data = pipe.recv()
        return torch.load(io.BytesIO(data), weights_only=False) if ok else Failed(*data)

    def run(self, ranks, function, *arguments):
        results = self.each(ranks, function, [arguments] * ranks)
        failed = [result for result in results if isinstance(result, Failed)]
        if failed:
            raise Failed(failed[0].kind, failed[0].message, "\n".join(map(str, failed)))
        return results


def _spawned(function, arguments):
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def _bytes(value):
    """Tensors in a pipe would be passed as file descriptors."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _serve(pipe, store, rank, count, timeout, backend):
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        interpret_quickly(pytest.MonkeyPatch())
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=count, timeout=timedelta(seconds=timeout))
    members = {1: Member(dist.new_group([rank], use_local_synchronization=True), 0, 1, device)}
    for ranks in range(2, count + 1):
        group = dist.new_group(list(range(ranks)), timeout=timedelta(seconds=timeout))
        if rank < ranks:
            members[ranks] = Member(group, rank, ranks, device)
    while (message := pipe.recv()) is not None:
        ranks, function, arguments = message
        try:
            result = in_one_piece(function, members[ranks], *torch.load(io.BytesIO(arguments), weights_only=False))
            pipe.send((True, _bytes(result)))
        except Exception as error:
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))
    dist.destroy_process_group()
