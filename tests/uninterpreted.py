"""Python in another process, where Triton compiles: it compiles or interprets as it was told when it was imported.

The processes are forks of one that has imported PyTorch and Triton, so that not every one of them takes the seconds of
those imports.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]


def python(*words):
    """What `python -m MODULE ...` or `python -c SOURCE` did in the project's folder: its status and its output."""
    with tempfile.TemporaryDirectory() as folder:
        process = _context().Process(target=_run, args=(words, folder))
        process.start()
        process.join()
        stdout, stderr = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(words, process.exitcode, stdout, stderr)


@cache
def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["experiments.benchmarks.compile.report", "triton.experimental.gluon"])
    with mock.patch.dict(os.environ):
        os.environ.pop("TRITON_INTERPRET", None)
        forkserver.ensure_running()  # with this environment, which its forks inherit
    return context


def _run(words, folder):
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), number)
    os.chdir(ROOT)
    way, what, *arguments = words
    sys.argv = [what, *arguments]
    if way == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        assert way == "-c" and not arguments
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
