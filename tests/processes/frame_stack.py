"""Python's frames in one piece of memory.

CPython keeps the frames of a thread in pieces of 16 KB, from 3.11 on. A call that does not fit into the last piece
allocates another, which is freed when the call returns. A loop whose calls cross the end of a piece does both each
time, which is slow in Triton's interpreter.
"""

_WORDS = 1 << 16  # of the frame of `in_one_piece`: half a megabyte, in a piece of one; the other half is for its calls


def in_one_piece(function, *arguments):
    """Calls the function with room in the current piece for the frames of its calls."""
    return function(*arguments)


in_one_piece.__code__ = in_one_piece.__code__.replace(co_stacksize=_WORDS)
