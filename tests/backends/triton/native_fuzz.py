"""Draws kernels and calls for the compiled module that starts kernels, most of them wrong, in a process of its own.

    python -m tests.backends.triton.native_fuzz SEED COUNT [FLAG...]

FLAG: of the compiler, such as -fsanitize=address. Each call that is right must start kernels with the `parameters` of
its arguments; a wrong one must raise, and nothing may be read or written that does not belong to it, which the
sanitizers see.
"""

import ctypes
import random
import struct
import sys

import torch

from sparseflash.backends.triton import native

LAUNCH = [ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)]
NUMBERS = {"b": 1, "B": 1, "h": 2, "H": 2, "i": 4, "I": 4, "q": 8, "Q": 8, "f": 4, "d": 8}
WRONG = (None, "x", b"", -1, 2**70, 1.5, (), [], {}, object(), torch, torch.float16)


class Driver:
    """Stands in for the driver's functions, at addresses that C can call, and keeps the parameters of launches."""

    def __init__(self):
        self.sizes, self.seen, self.status = [], [], 0
        self.functions = (
            ctypes.CFUNCTYPE(ctypes.c_int, *LAUNCH, ctypes.c_void_p)(lambda *all: self.launched(*all[:-1])),
            ctypes.CFUNCTYPE(ctypes.c_int, *LAUNCH)(self.launched),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(self.replaced),
        )
        self.launch, self.resident, self.replace = (ctypes.cast(f, ctypes.c_void_p).value for f in self.functions)

    def launched(self, function, *rest):
        *grid, stream, parameters = rest
        values = [ctypes.string_at(parameters[i], size) for i, size in enumerate(self.sizes)]
        self.seen.append((function, *grid, stream, values))
        return self.status

    def replaced(self, descriptor, address):
        ctypes.memmove(descriptor, struct.pack("Q", address or 0), 8)
        return 0


def number(draw, code):
    if code in "fd":
        return draw.choice([0.0, -1.5, 3, float("inf"), 2.0 ** draw.randint(-140, 127)])
    bits = 8 * NUMBERS[code]
    return draw.randint(0, 2**bits - 1) if code.isupper() else draw.randint(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def kernel(draw, driver):
    slots = draw.randint(0, 5)
    kinds = [draw.choice(["D", "P", *NUMBERS]) for _ in range(draw.randint(0, 9))]
    described = kinds.count("D")
    contents = bytearray(draw.randbytes(128 * described + 8 * (len(kinds) - described) + 16))
    offsets, values, at = [], [], [0, 128 * described]
    forms = [
        draw.choice([(-1, -1), (draw.randint(0, 2), -1), (draw.randint(0, 2), draw.randint(0, 2))]) for _ in range(5)
    ]
    codes = [draw.choice(kinds) if kinds else "P" for _ in range(5)]
    for kind in kinds:
        size = 128 if kind == "D" else 8
        offset = at[kind != "D"]
        at[kind != "D"] += size
        offsets.append(offset)
        possible = [slot for slot in range(slots) if codes[slot] == kind or {codes[slot], kind} == {"D", "P"}]
        if possible and draw.random() < 0.8:
            slot = draw.choice(possible)
            values.append((offset, kind, slot, *forms[slot]))
    values.sort(key=lambda value: value[2])
    resident = draw.random() < 0.3
    parameters = (*offsets, at[1], at[1] + 8)
    made = (
        99, driver.resident if resident else driver.launch, driver.replace, resident, draw.randint(0, 9),
        32 * draw.randint(1, 8), draw.randint(0, 9999), bytes(contents), parameters, tuple(values),
        tuple(f"x{slot}" for slot in range(slots)),
    )  # fmt: skip
    sizes = [*(128 if kind == "D" else 8 for kind in kinds), 8, 8]

    def arguments():
        found = []
        for slot in range(slots):
            code = codes[slot]
            x = number(draw, code) if code in NUMBERS else torch.empty(draw.randint(0, 3), dtype=torch.bfloat16)
            for index in forms[slot][::-1]:
                if index >= 0:
                    x = draw.choice([tuple, list])([None] * index + [x])
            found.append(x)
        return found

    return made, sizes, arguments


def spoiled(draw, values):
    values = list(values)
    how = draw.randint(0, 3)
    if how == 0 and values:
        values.pop()
    elif how == 1:
        values.append(draw.choice(WRONG))
    elif values:
        values[draw.randrange(len(values))] = draw.choice(WRONG)
    return values


def tried(function, *arguments):
    try:
        return function(*arguments)
    except (TypeError, ValueError, OverflowError, KeyError, IndexError, AttributeError, struct.error) as error:
        return error


def parameters(made, sizes, given):
    """What a launch reads: the contents of the kernel with the values of a call."""
    *_, contents, offsets, values, _ = made
    contents = bytearray(contents)
    for offset, code, slot, *indices in values:
        x = given[slot]
        for index in indices:
            x = x[index] if index >= 0 else x
        x, code = (x.data_ptr(), "Q") if code in "DP" else (x, code)
        struct.pack_into(f"={code}", contents, offset, x)
    return [bytes(contents[offset : offset + size]) for offset, size in zip(offsets, sizes, strict=True)]


def draw_once(draw, driver, module):
    made, driver.sizes, arguments = kernel(draw, driver)
    here = module.Kernel(*made)
    for _ in range(3):
        given, programs = arguments(), draw.randint(0, 5)
        bound = draw.randint(0, len(given))
        driver.status = draw.choice([0, 0, 0, 1, 700])
        named = {f"x{slot}": x for slot, x in enumerate(given)} | {"other": None}
        with_some = here.bound(programs, tuple(given[:bound]))
        results = [
            here.start(programs, tuple(given), 1234), with_some.start(programs, given[bound:], 1234),
            module.start((with_some, with_some), named, 1234),
        ]  # fmt: skip
        assert results == [(0, driver.status) if driver.status else None] * 3
        launch = made[0], programs, 1, 1, made[5], 1, 1, made[6], 1234, parameters(made, driver.sizes, given)
        assert driver.seen == [launch] * (3 if driver.status else 4), (made, given, driver.seen)
        driver.seen.clear()
        driver.status = 0
        tried(here.start, programs, spoiled(draw, given), 1234)
        tried(here.start, *spoiled(draw, (programs, tuple(given), 1234)))
        tried(here.bound, *spoiled(draw, (programs, tuple(given[:bound]))))
        tried(here.bound, programs, tuple(spoiled(draw, given[:bound])))
        tried(module.start, *spoiled(draw, ((here,), named, 1234)))
        tried(module.start, tuple(spoiled(draw, (here, here))), named, 1234)
        tried(module.start, (here,), {name: x for name, x in named.items() if draw.random() < 0.8}, 1234)
        tried(module.layouts, *spoiled(draw, given))
        driver.seen.clear()
    wrong = spoiled(draw, made)
    if wrong[1:3] == list(made[1:3]):  # an address cannot be checked
        tried(module.Kernel, *wrong)
    for place in (8, 9, 10):
        other = list(made)
        other[place] = tuple(spoiled(draw, made[place]))
        kernel_or_error = tried(module.Kernel, *other)
        if place == 9 and made[9]:
            value = list(draw.choice(made[9]))
            value[draw.randrange(5)] = draw.choice([*WRONG, 10**6, -2, 4, "z"])
            other[9] = (tuple(value),)
            kernel_or_error = tried(module.Kernel, *other)
        if not isinstance(kernel_or_error, Exception) and place != 8:
            tried(kernel_or_error.start, 1, arguments(), 1234)
        driver.seen.clear()


if __name__ == "__main__":
    torch.set_num_threads(1)
    draw, driver, module = random.Random(int(sys.argv[1])), Driver(), native.compiled(sys.argv[3:])
    for _ in range(int(sys.argv[2])):
        draw_once(draw, driver, module)
    print("all drawn")
