"""Python in another process, where Triton compiles: it compiles or interprets as it was told when it was imported."""

import os
import runpy
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from forked import ROOT, Server, redirected


def python(*words):
    """What `python -m MODULE ...` or `python -c SOURCE` did in the project's folder: its status and its output."""
    with tempfile.TemporaryDirectory() as folder:
        process = _server().start(_run, (words, folder), daemon=False)
        process.join()
        stdout, stderr = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(words, process.exitcode, stdout, stderr)


@cache
def _server():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return Server("experiments.benchmarks.compile.report", "triton.experimental.gluon", environment=environment)


def _run(words, folder):
    redirected(1, Path(folder, "stdout"))
    redirected(2, Path(folder, "stderr"))
    os.chdir(ROOT)
    way, what, *arguments = words
    sys.argv = [what, *arguments]
    if way == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        assert way == "-c" and not arguments
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
