import os
from functools import cache

from tests.processes import forked


def python(*words):
    """The status and output of `python -m MODULE ...` or `python -c SOURCE` in the project's folder."""
    return forked.python(*words, server=_server())


@cache
def _server():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return forked.Server("tests.compiling.preloaded", environment=environment)
