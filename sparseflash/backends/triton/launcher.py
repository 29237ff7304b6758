"""Starts Triton kernels: arguments by their names, compiled once for each kind of arguments, launched at little cost.

A `Variant` is a kernel for arguments of one kind: constants, dtypes, which pointers are None, which addresses and
strides are multiples of 16. A `Launch` is a variant with its grid and all arguments that stay the same from call to
call; it is called with the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.triton.cuda_graphs import refuse_to_record

# Multiply-adds rounded once: fewer instructions, smaller errors. Triton's default depends on its version.
OPTIONS = {"enable_fp_fusion": True}
# The compute capability of the oldest GPU that the kernels run on: Ampere, the first with bf16 and asynchronous copies.
OLDEST = (8, 0)
# The versions of Triton whose launchers are called directly, which takes half of the time that Triton's own front
# takes. That is no public interface: with other versions launches go through the front.
DIRECT_VERSIONS = ((3, 6), (3, 7), (3, 8), (3, 9))


class Variant:
    """One kernel for arguments of one kind, on one device.

    Whoever shares it sees to it that every launch has arguments to which Triton specialises in the same way.
    """

    def __init__(
        self, function: Any, constants: Mapping[str, Any], device: torch.device, *, num_warps: int, num_stages: int,
        registers: int = 0,
    ) -> None:  # fmt: skip
        """constants: arguments that are the same for all launches, by name. registers: the most a thread may have."""
        self.function, self.constants, self.device = function, dict(constants), device
        self.names: tuple[str, ...] = tuple(function.arg_names)
        self.options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, **OPTIONS}
        if registers:
            self.options["maxnreg"] = registers
        # Starts the compiled kernel: of the number of programs and all arguments, tensors as addresses.
        self._start: Callable[[int, Sequence[Any]], None] | None = None
        self._hooks: Any = None  # a profiler's, which Triton's front calls with what it collects of a launch
        self._index = device.index
        self.compiling: Future[None] | None = None  # on another thread
        self._launched = False

    def __call__(self, programs: int, *arguments: Any) -> None:
        """Launches the kernel with all of its arguments, in its order."""
        start = self.direct()
        if start is None:
            self.launch(programs, arguments)
        else:
            start(programs, [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments])

    def is_new(self) -> bool:
        """Whether it is neither compiled nor being compiled."""
        return self._start is None and self.compiling is None and not self._launched

    def direct(self) -> Callable[[int, Sequence[Any]], None] | None:
        """Starts the kernel without Triton's front; None where that has to be passed."""
        start = self._start
        if start is None or torch._C._cuda_getDevice() != self._index:
            return None
        hooks = self._hooks
        return None if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls else start

    def launch(self, programs: int, arguments: Sequence[Any]) -> None:
        """Launches through Triton's own front, which compiles the first time."""
        if not self._launched:
            refuse_to_record(self.device)  # its code would be loaded
        if self.compiling is not None:
            self.compiling.result()
            self.compiling = None
        with on_device(self.device):
            compiled = self.function[(programs, 1, 1)](*arguments, **self.options)
        self._launched = True
        if self._start is None and compiled is not None:  # the interpreter compiles nothing
            from triton import knobs

            self._hooks = knobs.runtime
            self._start = direct_start(compiled, self.device)

    def compile(self, arguments: Sequence[Any]) -> None:
        """Compiles and loads without launching; on any thread. Tensors may be on the meta device."""
        if self._start is None and hasattr(self.function, "warmup"):
            with on_device(self.device):
                compiled = self.compiled(arguments)
                if compiled is not None:
                    compiled.run  # noqa: B018 - loads the binary, and in Triton 3.6 compiles its launcher

    def compiled(self, arguments: Sequence[Any]) -> Any:
        """What Triton compiles for such arguments on the current device, not loaded."""
        return self.function.warmup(*arguments, grid=(1, 1, 1), **self.options)


class Launch:
    """A variant with all arguments that stay the same from call to call, and with the number of its programs.

    It is called with the others, in the order of the examples that it was made of.
    """

    def __init__(
        self, variant: Variant, fixed: Mapping[str, Any], examples: Mapping[str, Any],
        described: Mapping[str, Describe],
    ) -> None:  # fmt: skip
        """fixed: arguments by name, tensors among them; those that are to be bound may be None.

        examples: of the arguments that calls give, by name, tensors on the meta device. described: of those the ones
        that the kernel takes as descriptors.
        """
        given = {**variant.constants, **fixed, **dict.fromkeys(examples)}
        missing = [name for name in variant.names if name not in given]
        unknown = [name for name in given if name not in variant.names]
        if missing or unknown:
            raise TypeError(f"{variant.function.__name__} lacks {missing} and does not know {unknown}")
        self.variant, self.programs = variant, 0
        self._arguments = [given[name] for name in variant.names]  # holds the tensors
        self._addresses = _addresses(self._arguments)
        self._slots = [(variant.names.index(name), described.get(name)) for name in examples]
        self._examples = tuple(examples.values())

    def bound(self, programs: int, **tensors: Tensor) -> Launch:
        """The same with so many programs, and with these tensors."""
        made = object.__new__(Launch)
        made.__dict__ = dict(self.__dict__)
        made.programs = programs
        made._arguments = self._arguments.copy()
        for name, x in tensors.items():
            made._arguments[self.variant.names.index(name)] = x
        made._addresses = _addresses(made._arguments)
        return made

    def __call__(self, *given: Any) -> None:
        """Launches the kernel with these tensors, numbers or Nones."""
        start = self.variant.direct()
        if start is None:
            self.variant.launch(self.programs, self.arguments(given))
            return
        arguments = self._addresses.copy()
        for (slot, describe), x in zip(self._slots, given):
            if describe is not None:
                arguments[slot] = describe(x)
            elif type(x) is Tensor:
                arguments[slot] = x.data_ptr()  # the launcher would ask the driver whose address a tensor's is
            else:
                arguments[slot] = x
        start(self.programs, arguments)

    def compile(self) -> None:
        """Compiles what calls will launch; on any thread."""
        self.variant.compile(self.arguments(self._examples))

    def compiled(self) -> Any:
        """What Triton compiles for calls on the current device, not loaded."""
        return self.variant.compiled(self.arguments(self._examples))

    def arguments(self, given: Sequence[Any]) -> list[Any]:
        """All arguments, in the order of the kernel."""
        arguments = self._arguments.copy()
        for (slot, describe), x in zip(self._slots, given, strict=True):
            arguments[slot] = x if describe is None else describe(x)
        return arguments


def _addresses(arguments: Sequence[Any]) -> list[Any]:
    return [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]


class Describe:
    """Makes tensor descriptors for the copy engine, of tensors that differ in their address only."""

    def __init__(self, like: Tensor, shape: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        # Checked once, here: making one through its constructor costs 3 us a call.
        checked = TensorDescriptor(like, list(shape), list(strides), list(box))
        self._kind, self._fields = TensorDescriptor, dict(checked.__dict__)

    def __call__(self, x: Tensor) -> Any:
        made = object.__new__(self._kind)
        made.__dict__ = {**self._fields, "base": x}
        return made


def direct_start(compiled: Any, device: torch.device) -> Callable[[int, Sequence[Any]], None] | None:
    """Starts a compiled kernel on the current stream, without Triton's front; None where that is not known to work."""
    if not is_direct_version():
        return None
    launcher, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    index, stream_of = device.index, torch._C._cuda_getCurrentRawStream

    def start(programs: int, arguments: Sequence[Any]) -> None:
        launcher(programs, 1, 1, stream_of(index), function, packed, None, None, None, *arguments)

    return start


def is_direct_version() -> bool:
    """Whether the installed Triton is one of `DIRECT_VERSIONS`."""
    return triton_version() in DIRECT_VERSIONS


def triton_version() -> tuple[int, int]:
    """Major and minor version of the installed Triton."""
    import triton  # only here: this module can be imported where Triton is missing

    found = re.match(r"(\d+)\.(\d+)", triton.__version__)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Makes a GPU the current one, which is where Triton launches."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()
