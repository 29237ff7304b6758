"""Imported once by the server of `uninterpreted`."""

import gc

import rich.table  # noqa: F401
import torch.fx.experimental.symbolic_shapes  # noqa: F401 - for `torch.empty_like` on the meta device
import triton.experimental.gluon  # noqa: F401
import typer  # noqa: F401
from triton import knobs
from triton.runtime.cache import triton_key

import experiments.benchmarks.compile.report  # noqa: F401

triton_key()  # reads all of Triton, which it does once a process

# Faster without line numbers.
knobs.compilation.disable_line_info = True
gc.freeze()  # so that no collection goes through the imported objects
