"""Launches a compiled Triton kernel through the CUDA driver, without Triton's launcher.

Triton's launcher converts all arguments and makes the TMA descriptors in Python at every call, longer than all other
host work of a short call. Here the parameters of a launch are kept in a buffer; a call writes only those that differ,
and the driver replaces the addresses in the descriptors, in C (`native.c`).

Triton does not document the parameters of a compiled kernel: they are derived from its signature, only for known
versions, and compared with the declaration in the PTX.

Triton 3.6 to 3.9 pass the arguments, each descriptor followed by its sizes and strides, then two addresses of scratch
memory. From 3.7 on, one C launcher serves all kernels; from 3.8 on, a launch attribute allows more than 228 KB of
shared memory, which our kernels do not need. Triton launches instrumented kernels, which have more parameters or use
scratch memory.
"""

from __future__ import annotations

import ctypes
import re
import struct
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseflash.backends.triton import native
from sparseflash.cuda_driver import cuda_driver, raise_if_failed

DESCRIPTOR = "descriptor"
# Triton's type names -> format characters of Python's struct.
_CODES = {
    "i1": "B", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "fp64": "d",
}  # fmt: skip
_DESCRIPTOR_BYTES, _ALIGNMENT = 128, 64  # of a CUtensorMap
_ELEMENTS = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CUtensorMapDataType
_L2_IN_128_BYTES = 2  # CUtensorMapL2promotion: what Triton asks for


class Parameter(NamedTuple):
    """A parameter of a compiled kernel."""

    argument: int  # index of its argument
    # Index in the argument, if that is a tuple (several indices if nested), or in a descriptor's sizes and strides.
    item: int | tuple[int, ...] | None
    code: str  # format character of Python's struct, or DESCRIPTOR


def parameters_of(signature: Mapping[str, Any], names: Sequence[str]) -> list[Parameter] | None:
    """The parameters of a kernel compiled for `{argument: type}`, in order; None if a type is unknown.

    >>> found = parameters_of({"x": "*bf16", "D": "constexpr", "strides": ("i32", "constexpr")}, ["x", "D", "strides"])
    >>> [tuple(each) for each in found]
    [(0, None, 'Q'), (2, 0, 'i')]
    >>> parameters_of({"changes": ((), ("*fp32",))}, ["changes"])
    [Parameter(argument=0, item=(1, 0), code='Q')]
    """
    found = []
    for argument, name in enumerate(names):
        kind = signature[name]
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            rank = kind.partition("]")[0].count(",") + 1  # Gluon's names go on with a layout
            found.append(Parameter(argument, None, DESCRIPTOR))
            found += [Parameter(argument, item, "iq"[item >= rank]) for item in range(2 * rank)]
            continue
        for item, each in _leaves(kind):
            if each == "constexpr":
                continue
            code = "Q" if isinstance(each, str) and each.startswith("*") else _CODES.get(each)
            if code is None:
                return None
            found.append(Parameter(argument, item, code))
    return found


def _leaves(kind: Any, path: tuple[int, ...] = ()) -> list[tuple[int | tuple[int, ...] | None, Any]]:
    if not isinstance(kind, tuple):
        return [(None if not path else path[0] if len(path) == 1 else path, kind)]
    return [leaf for item, each in enumerate(kind) for leaf in _leaves(each, (*path, item))]


def are_declared(parameters: Sequence[Parameter], ptx: str) -> bool:
    """Whether a kernel's PTX declares parameters of exactly these sizes, followed by the two that Triton adds.

    >>> ptx = ".entry add(.param .u64 .ptr .global .align 1 a, .param .u32 b, .param .u64 c, .param .u64 d)"
    >>> are_declared([Parameter(0, None, "Q"), Parameter(1, None, "i")], ptx)
    True
    >>> are_declared([Parameter(0, None, "Q"), Parameter(1, None, "q")], ptx)
    False
    """
    entry = re.search(r"\.entry\s+\S+?\((.*?)\)", ptx, re.DOTALL)
    sizes = [_DESCRIPTOR_BYTES if each.code == DESCRIPTOR else struct.calcsize(each.code) for each in parameters]
    return entry is not None and [_size(text) for text in entry[1].split(",")] == [*sizes, 8, 8]


def _size(declaration: str) -> int:
    """The bytes of `.param .u32 name` or `.param .align 64 .b8 name[128]`."""
    found = re.search(r"\.b8\s+\w+\[(\d+)\]", declaration)
    if found is not None:
        return int(found[1])
    found = re.search(r"\.[usbf](\d+)\b", declaration)
    return 0 if found is None else int(found[1]) // 8


def parameters_of_compiled(compiled: Any, names: Sequence[str]) -> list[Parameter] | None:
    """The parameters of a kernel that Triton has compiled; None if it cannot be started directly."""
    metadata = compiled.metadata
    plain = (
        metadata.num_ctas == 1 and not metadata.launch_pdl
        and metadata.global_scratch_size == 0 and metadata.profile_scratch_size == 0
        and not any(each["fp4_padded"] or each.get("is_im2col") for each in metadata.tensordesc_meta or ())
    )  # fmt: skip
    parameters = parameters_of(compiled.src.signature, names) if plain else None
    return parameters if parameters is not None and are_declared(parameters, compiled.asm["ptx"]) else None


def loaded(compiled: Any, device: torch.device) -> int | None:
    """The driver's handle of a compiled kernel; None if the GPU has too little shared memory or too few registers.

    Triton's own loading would also make a launcher, which version 3.6 compiles from C in half a second.
    """
    functions = _loaded.setdefault(compiled, {})
    if device.index not in functions:
        from triton.runtime import driver

        utils = driver.active.utils
        if compiled.metadata.shared > utils.get_device_properties(device.index)["max_shared_mem"]:
            return None
        _, function, _, _, most_threads = utils.load_binary(
            compiled.name, compiled.kernel, compiled.metadata.shared, device.index
        )
        if 32 * compiled.metadata.num_warps > most_threads:
            return None
        functions[device.index] = function
    return functions[device.index]


# The driver's handles of compiled kernels, by GPU. A kernel is loaded once and never unloaded, as in Triton 3.6.
_loaded: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()


class Driver(NamedTuple):
    """The addresses of the driver's functions that start kernels."""

    launch: int
    launch_resident: int  # fails unless all programs of the grid can be resident at once
    replace_address: int  # of a descriptor

    @classmethod
    def of_this_machine(cls) -> Driver:
        library = cuda_driver()
        names = "cuLaunchKernel", "cuLaunchCooperativeKernel", "cuTensorMapReplaceAddress"
        return cls(*(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names))


def kernel_of(
    function: int, metadata: Any, parameters: Sequence[Parameter], arguments: Sequence[Any],
    given: Mapping[str, int],
) -> Any:  # fmt: skip
    """A compiled kernel with the parameters of one launch, except for the arguments given at each call: a `Kernel` of
    `native.c`.

    function: from `loaded`. metadata: Triton's metadata of the compiled kernel. arguments: all arguments of an example
    call. given: the indices of the arguments passed at each call, by name, in order.
    """
    slots = {number: slot for slot, number in enumerate(given.values())}
    described = [each for each in parameters if each.code == DESCRIPTOR]
    offsets: dict[Parameter, int] = {each: _DESCRIPTOR_BYTES * n for n, each in enumerate(described)}
    contents = ctypes.create_string_buffer(_DESCRIPTOR_BYTES * len(described) + _ALIGNMENT)
    start = -ctypes.addressof(contents) % _ALIGNMENT
    for number, each in enumerate(described):
        address = ctypes.addressof(contents) + start + offsets[each]
        _encode(address, arguments[each.argument], metadata.tensordesc_meta[number])
    packed, values = bytearray(), []
    for each in parameters:
        item, inner = _indices(each)
        if each.code != DESCRIPTOR:
            offsets[each] = _DESCRIPTOR_BYTES * len(described) + len(packed)
            packed += _packed(each.code, _value(arguments, each))
        if each.argument in slots and not _is_of_descriptor(each, described):
            code = "D" if each.code == DESCRIPTOR else "P" if _is_tensor(arguments, each) else each.code
            if inner is None:
                raise RuntimeError("what is given at each call must be tensors, tuples of them, or tuples of those")
            values.append((offsets[each], code, slots[each.argument], item, inner))
    scratch = _DESCRIPTOR_BYTES * len(described) + len(packed)  # two null pointers: no scratch memory
    driver, resident = Driver.of_this_machine(), bool(metadata.launch_cooperative_grid)
    return native.module().Kernel(
        function, driver.launch_resident if resident else driver.launch, driver.replace_address, resident, 0,
        32 * metadata.num_warps, metadata.shared,
        contents.raw[start : start + _DESCRIPTOR_BYTES * len(described)] + bytes(packed) + bytes(16),
        (*(offsets[each] for each in parameters), scratch, scratch + 8),
        tuple(sorted(values, key=lambda value: value[2])), tuple(given),
    )  # fmt: skip


def _is_of_descriptor(parameter: Parameter, descriptors: Sequence[Parameter]) -> bool:
    return parameter.code != DESCRIPTOR and any(each.argument == parameter.argument for each in descriptors)


def _is_tensor(arguments: Sequence[Any], parameter: Parameter) -> bool:
    return isinstance(_argument(arguments, parameter), Tensor)


def _indices(parameter: Parameter) -> tuple[int, int | None]:
    """The index in an argument that is a tuple, and the one in its item; -1 for none, None if there are more."""
    item = parameter.item
    if not isinstance(item, tuple):
        return -1 if item is None else item, -1
    return item[0], item[1] if len(item) == 2 else None


def _packed(code: str, value: int | float) -> bytes:
    return struct.pack("=" + code, value).ljust(8, b"\0")


def _value(arguments: Sequence[Any], parameter: Parameter) -> int | float:
    value = _argument(arguments, parameter)
    return value.data_ptr() if isinstance(value, Tensor) else value


def _argument(arguments: Sequence[Any], parameter: Parameter) -> Any:
    value = arguments[parameter.argument]
    if parameter.item is None:
        return value
    if not isinstance(value, tuple):
        value = *value.shape, *value.strides
    for item in parameter.item if isinstance(parameter.item, tuple) else (parameter.item,):
        value = value[item]
    return value


def _encode(address: int, described: Any, metadata: Mapping[str, Any]) -> None:
    """Writes the TMA descriptor of a tensor, as Triton's launcher would."""
    x: Tensor = described.base
    sizes, strides, box = described.shape[::-1], described.strides[-2::-1], metadata["block_size"][::-1]
    rank = len(sizes)
    result = cuda_driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(address), _ELEMENTS[x.dtype], rank, ctypes.c_void_p(x.data_ptr()),
        (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * rank)(*(n * x.element_size() for n in strides)),
        (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank), 0, metadata["swizzle"],
        _L2_IN_128_BYTES, 0,
    )  # fmt: skip
    raise_if_failed(result, f"to describe a tensor of shape {described.shape} and strides {described.strides}")
