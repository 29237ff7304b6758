"""The error of a MASK argument that gives no mask, and the file name by which tracebacks know its code."""

EXPRESSION = "<mask>"


class Refused(ValueError):
    """The MASK argument does not give a mask."""
