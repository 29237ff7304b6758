"""Processes that start with PyTorch imported: forks of a server that has imported it once.

    server = Server("torch", environment={**os.environ, "TRITON_INTERPRET": "1"})
    process = server.start(function, arguments)  # a multiprocessing.Process
    done = python("-c", "print(1)")  # as subprocess.run would return it; or "-m", module, and its arguments
    ranks(function, *arguments, processes=2)  # as torchrun would call it, twice

The imports take seconds; a process of the tests has threads, so it must not be forked itself.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from multiprocessing import connection, forkserver
from pathlib import Path
from unittest import mock

import torch
from torch.distributed import TCPStore

from tests.processes.frame_stack import in_one_piece

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 300


class Server:
    def __init__(self, *modules, environment):
        self._forks = forkserver.ForkServer()
        self._forks.set_forkserver_preload(list(modules))
        with mock.patch.dict(os.environ, environment, clear=True):
            self._forks.ensure_running()

    def start(self, function, arguments, daemon=True):
        """A daemon ends with this process, and starts none itself."""
        process = multiprocessing.get_context("forkserver").Process(target=function, args=arguments, daemon=daemon)
        with mock.patch.object(forkserver, "connect_to_new_process", self._forks.connect_to_new_process):
            process.start()
        return process


@cache
def interpreting():
    modules = ("torch.distributed.nn", "torch.distributed.device_mesh", "sparseflash.distributed", "triton.language")
    trainers = ("experiments.lra.train", "experiments.lm.train")
    return Server(*modules, *trainers, environment={**os.environ, "OMP_NUM_THREADS": "1"})


@cache
def after_torch():
    return Server(
        "torch", environment={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    )


def python(*words, server=None, environment=None):
    """Status and output of `python -m MODULE ...` or `python -c SOURCE` in the project's folder, in a fork of `server`
    or of `after_torch()`."""
    with tempfile.TemporaryDirectory() as folder:
        process = started(*words, folder=folder, server=server, environment=environment)
        process.join(TIMEOUT)
        if process.exitcode is None:
            process.kill()
            process.join()
        stdout, stderr = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(words, process.exitcode, stdout, stderr)


def started(*words, folder, server=None, environment=None):
    words = [str(word) for word in words]
    return (server or after_torch()).start(_run, (words, Path(folder), environment), daemon=False)


def _run(words, folder, environment):
    redirected(1, folder / "stdout")
    redirected(2, folder / "stderr")
    os.chdir(ROOT)
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    in_one_piece(execute, *words)


def execute(way, what, *arguments):
    sys.argv = [what, *map(str, arguments)]
    try:
        if way == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            assert way == "-c" and not arguments
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if end.code:
            raise


def execute_in_threads(threads, *words):
    torch.set_num_threads(threads)
    execute(*words)


def ranks(function, *arguments, processes):
    """Returns the output of each. If one fails, ends the others and raises AssertionError with all outputs."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "forked", "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(rank)) for rank in range(processes)]
        started = [
            interpreting().start(
                _rank, (shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, function, arguments, out)
            )
            for rank, out in enumerate(outputs)
        ]
        waiting = {process.sentinel: process for process in started}
        while waiting:
            ended = connection.wait(waiting, TIMEOUT)
            failed = [process for process in map(waiting.pop, ended) if process.join() or process.exitcode != 0]
            if failed or not ended:
                for process in waiting.values():
                    process.kill()
                    process.join()
                raise AssertionError("\n".join(out.read_text() for out in outputs if out.exists()) or "no output")
        return [out.read_text() for out in outputs]


def redirected(number, path):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)


def _rank(environment, function, arguments, output):
    redirected(1, output)
    redirected(2, output)
    os.chdir(ROOT)
    os.environ.update(environment)
    try:
        in_one_piece(function, *arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # others may be waiting for this one in a group
