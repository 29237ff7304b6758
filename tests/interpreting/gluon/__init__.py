"""Runs the Gluon kernels of a module on the CPU, from their own source, in PyTorch: Gluon itself has no interpreter.

    kernel = Interpreted(module, "forward_kernel", seed=3)
    kernel[(programs,)](*arguments, num_warps=4)

Every partition of every program is an actor, a Python thread, and one runs at a time. At each operation that another
actor can observe, the next one is drawn: a seed determines an interleaving, and a deadlock is found at once.
Asynchronous effects come as late as they may, and destroy at once what they may overwrite:

- a matrix instruction reads shared memory when it is waited for;
- a copy to global memory reads shared memory when it is waited for, and is visible to others when that, too, is waited
  for, or when the partition ends;
- a copy to shared memory fills it with NaN when it is issued, and with the numbers at some later time.

A missing barrier, or a wrong phase, shows as NaN or as a deadlock. A store to shared memory that is not fenced before
an asynchronous read is an error. Layouts are not checked.

    kernels.py    a kernel's source, run with Gluon's names replaced
    schedule.py   the actors, and whose turn is next
    values.py     what kernels hold: blocks in registers, pointers, descriptors, shared memory, barriers
    language.py   what the names of Gluon do here; a new operation of a kernel goes there
"""

from tests.interpreting.gluon.kernels import Interpreted
from tests.interpreting.gluon.schedule import Deadlock

__all__ = ["Deadlock", "Interpreted"]
