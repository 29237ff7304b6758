"""The plans of masks, and the kernels prepared for them."""

from sparseflash.backends.problem import Problem
from sparseflash.backends.triton.schedule.plan import plan_of
from sparseflash.blockmask.cache import mask_cache


def plan(mask, batch=1, heads=1, kv_heads=None):
    problem = Problem.of(mask._padded(None), scale=1.0)  # plans know no lengths
    return plan_of(problem, (batch, heads), heads if kv_heads is None else kv_heads, (mask.q_len, mask.k_len))


def plans_of(mask):
    return list(mask_cache(mask.indices).get("plans", {}).values())


def calls_of(mask):
    return list(mask_cache(mask.indices).get("prepared", {}).values())


def kernels_of(mask):
    """`{kernel: Bound}` of all passes that have been prepared for a mask."""
    found = {}
    for call in calls_of(mask):
        if call.forward is not None:
            found["forward"] = call.forward.kernel
        for run in call._backwards.values():
            found |= {"dq": run.queries, "dk_dv": run.keys}
            if run.means is not None:
                found["means"] = run.means
    return found
