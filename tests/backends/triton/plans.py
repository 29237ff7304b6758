"""The plans of masks: what was prepared for them, and settings that let small problems run as long ones do."""

from unittest import mock

from sparseflash.backends.problem import Problem
from sparseflash.backends.triton.overrides import NEVER_SPLIT, always_split, override
from sparseflash.backends.triton.schedule.plan import Plan, plan_of
from sparseflash.blockmask.cache import mask_cache

WAYS = {
    "own": lambda tilings: tilings[0],
    "united": lambda tilings: max((t for t in tilings if not t.gathered), key=lambda t: (t.held, t.streamed)),
    "gathered": lambda tilings: max(tilings, key=lambda t: (t.gathered > 0, t.held)),
    "gathered, few held": lambda tilings: min(tilings, key=lambda t: (t.gathered == 0, t.held)),
}


def plan(mask, batch=1, heads=1, kv_heads=None):
    problem = Problem.of(mask._padded(None), scale=1.0)
    return plan_of(problem, (batch, heads), heads if kv_heads is None else kv_heads, (mask.q_len, mask.k_len))


def counting_plans():
    """Inside, `call_count` of what it gives is the number of plans made."""
    return mock.patch.object(Plan, "__init__", autospec=True, side_effect=Plan.__init__)


def plans_of(mask):
    return list(mask_cache(mask.indices).get("plans", {}).values())


def calls_of(mask):
    return list(mask_cache(mask.indices).get("prepared", {}).values())


def kernels_of(mask):
    found = {}
    for call in calls_of(mask):
        if call.forward is not None:
            found["forward"] = call.forward.kernel
        for run in call._backwards.values():
            found |= {"dq": run.queries, "dk_dv": run.keys}
            if run.means is not None:
                found["means"] = run.means
    return found


def tilings_taken_by(way):
    return override(products_for_tilings=0) if way is None else override(tiling=WAYS[way])


def tilings_of(mask):
    return {name: kernel.choice.tiling for name, kernel in kernels_of(mask).items()}


def chunks_of(tokens):
    """Longer lists are cut into chunks of at most `tokens`, at least a tile."""
    return override(splits=NEVER_SPLIT if tokens is None else always_split(tokens))
