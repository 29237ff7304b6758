"""Launches Triton kernels: takes arguments by name, compiles each specialisation once, and launches at little cost.

A `Variant` is one specialisation of a kernel: constants, dtypes, which pointers are None, which addresses and strides
are multiples of 16. A `Launch` adds all arguments that are the same for tensors of one layout, a `BoundLaunch` the grid
and work lists of one plan. A `LaunchSequence` starts several by one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.triton import native
from sparseflash.backends.triton.architecture import architecture_of
from sparseflash.backends.triton.device import refuse_to_record
from sparseflash.backends.triton.direct_start import Parameter, kernel_of, loaded, parameters_of_compiled
from sparseflash.backends.triton.versions import is_measured, triton_version
from sparseflash.blockmask.cache import bounded
from sparseflash.cuda_driver import raise_if_failed
from sparseflash.limits import check_count

# Fused multiply-adds are fewer instructions and have smaller errors. Triton's default depends on its version.
OPTIONS = {"enable_fp_fusion": True}
_INVALID_CONTEXT = 201  # CUresult: no context is current on this thread yet


class Variant:
    """One specialisation of a kernel, on one device.

    All launches of a variant must pass arguments that Triton specialises on in the same way.
    """

    def __init__(
        self, function: Any, constants: Mapping[str, Any], device: torch.device, *, num_warps: int, num_stages: int,
        registers: int = 0, resident: bool = False,
    ) -> None:  # fmt: skip
        """constants: arguments that are the same for all launches, by name. registers: limit per thread, 0 for none.

        resident: the programs of a launch wait for one another, so it must be a cooperative launch.
        """
        self.function, self.constants, self.device = function, dict(constants), device
        self.names: tuple[str, ...] = tuple(function.arg_names)
        self.options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, **OPTIONS}
        if registers:
            self.options["maxnreg"] = registers
        if resident:
            self.options["launch_cooperative_grid"] = True
        self._compiled: Any = None  # Triton's compiled kernel
        self._parameters: list[Parameter] | None = None
        self._function = 0
        self._hooks: Any = None  # Triton's launch hooks, for profilers; only Triton's launcher calls them
        self.index = device.index
        self.compiling: Future[None] | None = None  # set while another thread compiles the kernel
        self._prepared = False
        self._first: list[Any] | None = None  # see `check_alike`

    @property
    def name(self) -> str:
        return str(self.function.__name__)

    def is_new(self) -> bool:
        return self._compiled is None and self.compiling is None and not self._prepared

    def can_start_directly(self) -> bool:
        if self._parameters is None or torch._C._cuda_getDevice() != self.index:
            return False
        hooks = self._hooks
        return not (hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)

    def kernel(self, arguments: Sequence[Any], given: Mapping[str, int]) -> Any:
        """`given`: the indices of the arguments that each call passes anew, by name."""
        if self._parameters is None:
            raise RuntimeError(f"{self.function.__name__} cannot be started directly")
        return kernel_of(self._function, self._compiled.metadata, self._parameters, arguments, given)

    def prepare(self, arguments: Sequence[Any]) -> None:
        """Compiles and loads the kernel the first time, or waits for the thread that compiles it."""
        if self._prepared:
            return
        refuse_to_record(self.device)  # a graph cannot record the loading of code
        if self.compiling is None:
            self.compile(arguments)
        else:
            self.compiling.result()
        self.compiling, self._prepared = None, True

    def check_alike(self, arguments: Sequence[Any]) -> None:
        """Raises RuntimeError if Triton would specialise these arguments otherwise than the first launch did, for
        which the kernel was compiled. A kernel that is started directly would not notice.
        """
        asked = getattr(self.function, "kwargs", {})
        anything, anywhere = (asked.get(name) or () for name in ("do_not_specialize", "do_not_specialize_on_alignment"))
        found = [
            x if name.isupper() else _specialised(x, name in anything, name in anywhere)
            for name, x in zip(self.names, arguments, strict=True)
        ]
        if self._first is None:
            self._first = found
        for name, x, first in zip(self.names, found, self._first, strict=True):
            if x != first:
                raise RuntimeError(
                    f"{name} of {self.name} must be alike in all starts of a launch; got {x}, and {first} at first."
                )

    def launch(self, programs: int, arguments: Sequence[Any]) -> None:
        with on_device(self.device):
            self.function[(programs, 1, 1)](*arguments, **self.options)

    def compile(self, arguments: Sequence[Any]) -> None:
        """Compiles and loads without launching; callable on any thread. Tensors may be on the meta device."""
        if self._compiled is not None:
            return
        from triton import knobs

        with on_device(self.device):
            compiled = self.compiled(arguments)
            if compiled is None:  # in the interpreter
                return
            # Triton's own launcher takes 50 us or more on the host; ours relies on undocumented details of a version.
            is_direct = is_measured(triton_version()) and native.module() is not native.Nothing
            parameters = parameters_of_compiled(compiled, self.names) if is_direct else None
            function = loaded(compiled, self.device) if parameters is not None else None
            if function is None:
                compiled.run  # noqa: B018 - loads the binary, and in Triton 3.6 compiles a launcher in C
        self._hooks, self._compiled = knobs.runtime, compiled
        if function is not None:  # the parameters last: other threads test them to see whether the kernel is ready
            self._function = function
            self._parameters = parameters

    def compiled(self, arguments: Sequence[Any]) -> Any:
        """A kernel that needs more shared memory than the GPU has is compiled with fewer pipeline stages: the tables
        choose stages for the tiles of q, k and v, but score modifications may load more, and the compiler decides what
        it stages. Stages do not change the order of sums, so the bits are the same.
        """
        options = dict(self.options)
        while True:
            compiled = self.function.warmup(*arguments, grid=(1, 1, 1), **options)
            if compiled is None or options["num_stages"] == 1 or _fits(compiled):
                self.options = options
                return compiled
            options["num_stages"] -= 1


class Launch:
    """A variant with all arguments that are the same for tensors of one layout."""

    def __init__(
        self, variant: Variant, fixed: Mapping[str, Any], examples: Mapping[str, Any],
        described: Mapping[str, Describe], *, bound: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """fixed: arguments by name. bound: names of the tensors (or Nones) that `bind` takes.

        examples: the arguments passed at each call, by name, as tensors on the meta device. described: functions that
        make the descriptors, by the names of the arguments that the kernel takes as descriptors.
        """
        given = {**variant.constants, **fixed, **dict.fromkeys(bound), **dict.fromkeys(examples)}
        if given.keys() != set(variant.names):
            missing = [name for name in variant.names if name not in given]
            unknown = [name for name in given if name not in variant.names]
            raise TypeError(f"{variant.function.__name__} lacks {missing} and does not know {unknown}")
        # A 64-bit integer would be an argument of another type.
        counts = {name: abs(value) for name, value in fixed.items() if isinstance(value, int)}
        largest = max(counts, key=counts.__getitem__, default="")
        check_count(
            f"{largest} of {variant.function.__name__}", counts.get(largest, 0), remedy="Split the batch or the heads."
        )
        self.variant, self.bound, self.examples = variant, tuple(bound), dict(examples)
        self._arguments = [given[name] for name in variant.names]
        self._slots = [(variant.names.index(name), described.get(name)) for name in (*bound, *examples)]
        self.kernel: Any = None  # see `Variant.kernel`; made by the first start without Triton's launcher
        # An itemgetter of one name does not return a tuple.
        self.pick: Callable[[Mapping[str, Any]], tuple[Any, ...]] = (
            itemgetter(*examples) if len(examples) > 1 else lambda given: tuple(given[name] for name in examples)
        )

    @classmethod
    def of_all_arguments(cls, function: Any, device: torch.device, *, num_warps: int, num_stages: int) -> Launch:
        """The launch of a kernel whose arguments are all passed at each call, including its compile-time constants.

        The first call decides which specialisation is compiled. So one launch may serve only calls with equal
        constants, dtypes, Nones, alignment, and so on. Callers cache one launch for each.
        """
        variant = Variant(function, {}, device, num_warps=num_warps, num_stages=num_stages)
        return cls(variant, {}, dict.fromkeys(variant.names), {})

    def bind(self, programs: int, **tensors: Tensor) -> BoundLaunch:
        check_count(f"programs of {self.variant.function.__name__}", programs, remedy="Split the batch or the heads.")
        return BoundLaunch(self, programs, tuple([tensors[name] for name in self.bound]))

    def start(self, programs: int, *given: Any) -> None:
        if not self.variant.can_start_directly():
            arguments = self.arguments(given)
            if self.variant.device.type == "cpu":  # in the interpreter: Triton's launcher on a GPU would compile anew
                self.variant.check_alike(arguments)
            self.variant.prepare(arguments)
            if not self.variant.can_start_directly():
                self.variant.launch(programs, arguments)
                return
        kernel = self.kernel
        if kernel is None:
            slots = {self.variant.names[slot]: slot for slot, _ in self._slots}
            kernel = self.kernel = self.variant.kernel(self.arguments(given), slots)
        stream = torch._C._cuda_getCurrentRawStream(self.variant.index)
        failed = kernel.start(programs, given, stream)
        if failed is not None:
            _after_refusal((self.variant,), failed, lambda _: kernel.start(programs, given, stream))

    def arguments(self, given: Sequence[Any]) -> list[Any]:
        arguments = self._arguments.copy()
        for (slot, describe), x in zip(self._slots, given, strict=True):
            arguments[slot] = x if describe is None else describe(x)
        return arguments


def launches_of(function: Any, *, num_warps: int, num_stages: int, most: int = 64) -> Callable[..., Launch]:
    """Makes `Launch.of_all_arguments` for a device and everything that Triton specialises on, its arguments: once for
    each; the last `most` are kept.
    """

    @bounded(maxsize=most)
    def launch(device: torch.device, *specialised: object) -> Launch:
        return Launch.of_all_arguments(function, device, num_warps=num_warps, num_stages=num_stages)

    return launch


class BoundLaunch:
    """A launch with its grid and bound tensors."""

    def __init__(self, launch: Launch, programs: int, tensors: tuple[Tensor, ...]) -> None:
        self.launch, self.programs, self.tensors = launch, programs, tensors
        self.kernels: tuple[Any, ...] | None = None

    def __call__(self, given: Mapping[str, Any]) -> None:
        if self.kernels is not None and self.launch.variant.can_start_directly():
            start_together((self.launch.variant,), self.kernels, given)
            return
        self.launch.start(self.programs, *self.tensors, *self.launch.pick(given))
        if self.launch.kernel is not None:
            self.kernels = (self.launch.kernel.bound(self.programs, self.tensors),)

    def compile(self) -> None:
        self.launch.variant.compile(self._example())

    def compiled(self) -> Any:
        return self.launch.variant.compiled(self._example())

    def _example(self) -> list[Any]:
        return self.launch.arguments((*self.tensors, *self.launch.examples.values()))


class LaunchSequence:
    """Launches that follow one another on one device. A repeated call starts all of them by one call of C."""

    def __init__(self, *launches: BoundLaunch | None) -> None:
        self.launches = [each for each in launches if each is not None]
        self._variants = tuple([each.launch.variant for each in self.launches])
        self._kernels: tuple[Any, ...] | None = None

    def __call__(self, given: Mapping[str, Any]) -> None:
        if self._kernels is not None and self._variants[0].can_start_directly():
            start_together(self._variants, self._kernels, given)
            return
        for each in self.launches:
            each(given)
        found = [each.kernels for each in self.launches if each.kernels is not None]
        if len(found) == len(self.launches):
            self._kernels = tuple([kernel for kernels in found for kernel in kernels])


def start_together(variants: tuple[Variant, ...], kernels: tuple[Any, ...], given: Mapping[str, Any]) -> None:
    """Starts these kernels one after another on the current stream; their device must be current."""
    stream = torch._C._cuda_getCurrentRawStream(variants[0].index)
    start = native.module().start
    failed = start(kernels, given, stream)
    if failed is not None:
        _after_refusal(variants, failed, lambda begun: start(kernels[begun:], given, stream))


def _after_refusal(
    variants: Sequence[Variant], failed: tuple[int, int], start: Callable[[int], tuple[int, int] | None]
) -> None:
    """Handles a kernel that the driver did not start. If this thread has no CUDA context yet, makes one current and
    starts the remaining kernels; otherwise raises RuntimeError.

    failed: how many kernels were started, and the driver's status. start: starts the kernels from a number on.
    """
    begun, status = failed
    if status == _INVALID_CONTEXT:
        torch.cuda.set_device(variants[0].device)
        again = start(begun)
        if again is None:
            return
        begun, status = begun + again[0], again[1]
    raise_if_failed(status, f"to start {variants[begun].name}")


class Describe:
    """Makes TMA descriptors for tensors that differ only in their address."""

    def __init__(
        self, like: Tensor, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], layout: Any = None
    ) -> None:
        """layout: of the box in shared memory, for kernels written in Gluon."""
        # Validated once, here: the constructor takes 3 us per call.
        sizes = list(shape), list(strides), list(box)
        checked: Any
        if layout is None:
            from triton.tools.tensor_descriptor import TensorDescriptor

            checked = TensorDescriptor(like, *sizes)
        else:
            from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

            checked = GluonDescriptor(like, *sizes, layout)
        self._kind, self._fields = type(checked), dict(checked.__dict__)

    def __call__(self, x: Tensor) -> Any:
        made = object.__new__(self._kind)
        made.__dict__ = {**self._fields, "base": x}
        return made


def _specialised(x: Any, anything: bool, anywhere: bool) -> Any:
    """The properties of an argument that Triton specialises on. anything, anywhere: not its value, not its address."""
    if isinstance(x, tuple):
        return tuple(_specialised(each, anything, anywhere) for each in x)
    if isinstance(x, Tensor):
        return x.dtype, anything or anywhere or x.is_meta or x.data_ptr() % 16 == 0
    if isinstance(x, int) and not anything:
        return type(x), x == 1, x % 16 == 0
    return None if x is None else "a number"


def _fits(compiled: Any) -> bool:
    metadata = compiled.metadata
    return bool(metadata.shared <= architecture_of(divmod(metadata.target.arch, 10)).shared_memory)


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Makes a GPU the current device, because Triton launches on the current device."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()
