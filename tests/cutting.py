"""Makes plans cut lists that are much too short for it, so that small problems reach what long ones do."""

import contextlib
from unittest import mock

from sparseflash.backends.triton.schedule import splits
from sparseflash.backends.triton.schedule.plan import dense_plan

EVERYTHING = {"multiprocessors": 1 << 40, "far": 0.0, "worth": 1.0, "worth_alike": 1.0}


@contextlib.contextmanager
def chunks_of(tokens):
    """All lists longer than that are cut into chunks of at most so many tokens, at least a tile; None: none is.

    For plans made inside; a mask keeps those that it has.
    """
    rule = splits.NEVER if tokens is None else splits.Rule(fewest=tokens, **EVERYTHING)
    with mock.patch.object(splits, "RULE", rule):
        dense_plan.cache_clear()
        yield
    dense_plan.cache_clear()
