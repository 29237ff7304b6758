"""Processes that begin with PyTorch imported: forks of a server that has imported it once.

    server = Server("torch", environment={**os.environ, "TRITON_INTERPRET": "1"})
    process = server.start(function, arguments)  # a multiprocessing.Process
    ranks(function, *arguments, processes=2)  # as torchrun would call it, twice

Python takes seconds for these imports, and a process of the tests itself must not be forked: it has threads.
"""

import multiprocessing
import os
import sys
import tempfile
import traceback
from functools import cache
from multiprocessing import connection, forkserver
from pathlib import Path
from unittest import mock

from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 300  # seconds


class Server:
    """A process that has imported some modules, in an environment that its forks inherit. It ends with this one."""

    def __init__(self, *modules, environment):
        self._forks = forkserver.ForkServer()
        self._forks.set_forkserver_preload(list(modules))
        with mock.patch.dict(os.environ, environment, clear=True):
            self._forks.ensure_running()

    def start(self, function, arguments, daemon=True):
        """A process that calls the function. A daemon ends with this process, and starts none itself."""
        process = multiprocessing.get_context("forkserver").Process(target=function, args=arguments, daemon=daemon)
        with mock.patch.object(forkserver, "connect_to_new_process", self._forks.connect_to_new_process):
            process.start()
        return process


@cache
def interpreting():
    """The server whose processes run kernels as this one does, with one thread each."""
    # What a process group and its kernels need, too.
    modules = ("torch.distributed.nn", "torch.distributed.device_mesh", "sparseflash.distributed", "triton.language")
    trainers = ("experiments.lra.train", "experiments.lm.train")
    return Server(*modules, *trainers, environment={**os.environ, "OMP_NUM_THREADS": "1"})


def ranks(function, *arguments, processes):
    """Calls the function in several processes, in which the environment is as torchrun makes it.

    Raises AssertionError with the output of all if one fails; the others are ended.
    """
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


def redirected(number, path):
    """What this process writes to a file descriptor goes to a file from now on."""
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)


def _rank(environment, function, arguments, output):
    redirected(1, output)
    redirected(2, output)
    os.chdir(ROOT)
    os.environ.update(environment)
    try:
        function(*arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # without waiting for a group whose other processes may be waiting for this one
