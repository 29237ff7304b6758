"""Makes plans cut short lists, so that small problems take the paths of long ones."""

from sparseflash.backends.triton.overrides import NEVER_SPLIT, always_split, override


def chunks_of(tokens):
    """Longer lists are cut into chunks of at most `tokens`, at least a tile; None: no list is cut."""
    return override(splits=NEVER_SPLIT if tokens is None else always_split(tokens))
