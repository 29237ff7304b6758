"""Makes plans cut lists that are much too short for it, so that small problems reach what long ones do."""

import contextlib
from unittest import mock

from plans import prepared_anew
from sparseflash.backends.triton.configs import NEVER_SPLIT, SplitRule
from sparseflash.backends.triton.schedule import splits

EVERYTHING = {"multiprocessors": 1 << 40, "heads": 1, "far": 0.0, "worth": 1.0, "worth_alike": 1.0}


@contextlib.contextmanager
def chunks_of(tokens):
    """All lists longer than that are cut into chunks of at most so many tokens, at least a tile; None: none is."""
    rule = NEVER_SPLIT if tokens is None else SplitRule(fewest=tokens, **EVERYTHING)
    with mock.patch.object(splits, "SPLITS", rule), prepared_anew():
        yield
