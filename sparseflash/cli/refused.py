"""The error of a MASK argument that gives no mask, and the file name of its code in tracebacks."""

EXPRESSION = "<mask>"


class Refused(ValueError):
    """The MASK argument does not give a mask."""
