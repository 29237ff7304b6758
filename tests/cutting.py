"""Makes plans cut lists that are much too short for it, so that small problems reach what long ones do."""

from sparseflash.backends.triton.overrides import NEVER_SPLIT, always_split, override


def chunks_of(tokens):
    """All lists longer than that are cut into chunks of at most so many tokens, at least a tile; None: none is."""
    return override(splits=NEVER_SPLIT if tokens is None else always_split(tokens))
