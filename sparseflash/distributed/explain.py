"""The text of `plan.explain()`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflash.distributed.costs import Machine, Shape

if TYPE_CHECKING:
    from sparseflash.distributed.plan import ShardPlan


def explained(plan: ShardPlan, shape: Shape, machine: Machine) -> str:
    """See `ShardPlan.explain`."""
    loads = plan.loads
    mask, tokens = plan.mask, plan.queries.counts
    lengths = f"{mask.q_len}" if mask.q_len == mask.k_len else f"{mask.q_len} x {mask.k_len}"
    lines = [
        f"{lengths} tokens over {plan.ranks} ranks: {plan.assignment.name}, in chunks of {plan.queries.chunk}; "
        f"{_span(tokens)} tokens a rank",
        f"live tiles: the mean rank has {100 * loads.balance:.1f} % of the most loaded rank's; "
        f"{100 * _share(loads.local.sum(), loads.total.sum()):.1f} % are of local keys",
        f"batch {shape.batch}, {shape.heads}:{shape.kv_heads} heads, D = {shape.dim}, Dv = {shape.v_dim}, "
        f"{str(shape.dtype).removeprefix('torch.')}; times are modelled for {machine.name}, not measured:",
        f"{'':14}{'MB sent, mean':>14}{'busiest':>9}{'compute':>10}{'transfer':>10}{'hidden':>8}{'total':>10}",
    ]
    chosen = plan.chosen(shape, machine)
    for each in plan.estimates(shape, machine):
        name = str(each)
        lines.append(
            f"{'* ' if each == chosen else '  '}{name:12}{each.mean_bytes / 1e6:14.2f}{each.most_bytes / 1e6:9.2f}"
            f"{each.compute * 1e3:7.2f} ms{each.transfer * 1e3:7.2f} ms{100 * each.hidden:6.0f} %"
            f"{each.total * 1e3:7.2f} ms"
        )
    lines.append(f"chosen (*): {chosen}")
    if plan.heads_refused(shape):
        lines.append(f"heads: not possible, {plan.heads_refused(shape)}")
    return "\n".join(lines)


def _span(counts: list[int]) -> str:
    return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 1.0
