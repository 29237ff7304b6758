"""Makes small problems run in other tiles than the mask's, as only long ones would, and says which they took."""

import contextlib
from unittest import mock

from plans import kernels_of, prepared_anew
from sparseflash.backends.triton.portable import choice
from sparseflash.backends.triton.schedule import retiling

# Which of the candidates a kernel takes: the mask's own, the largest, the gathered ones that hold most and fewest.
WAYS = {
    "own": lambda tilings: tilings[0],
    "united": lambda tilings: max((t for t in tilings if not t.gathered), key=lambda t: (t.held, t.streamed)),
    "gathered": lambda tilings: max(tilings, key=lambda t: (t.gathered > 0, t.held)),
    "gathered, few held": lambda tilings: min(tilings, key=lambda t: (t.gathered == 0, t.held)),
}


@contextlib.contextmanager
def tilings_taken_by(way):
    """Every kernel takes one of WAYS; None: what costs least."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(choice, "PRODUCTS_FOR_TILINGS", 0))
        if way is not None:
            stack.enter_context(mock.patch.object(retiling, "choose", lambda tilings, *rest: WAYS[way](tilings)))
        stack.enter_context(prepared_anew())
        yield


def tilings_of(mask):
    """`{kernel: Tiling}` of all kernels that the plans of a mask have prepared."""
    return {name: kernel.choice.tiling for name, kernel in kernels_of(mask).items()}
