"""Python in another process, where Triton compiles: it compiles or interprets as it was told when it was imported."""

import os
from functools import cache

import forked


def python(*words):
    """What `python -m MODULE ...` or `python -c SOURCE` did in the project's folder: its status and its output."""
    return forked.python(*words, server=_server())


@cache
def _server():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return forked.Server("tests.compiler_ready", environment=environment)  # it finds modules from the project's folder
