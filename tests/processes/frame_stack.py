"""Python's frames in one piece of memory.

CPython keeps a thread's frames in pieces of 16 KB. A loop whose calls cross the end of a piece allocates and frees
another at each call, which is slow in Triton's interpreter.
"""

_WORDS = 1 << 16


def in_one_piece(function, *arguments):
    return function(*arguments)


in_one_piece.__code__ = in_one_piece.__code__.replace(co_stacksize=_WORDS)
