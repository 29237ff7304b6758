"""`sparseflash.distributed.attention` in several processes as one function of whole tensors: what the processes run,
and what the test runs."""

import torch

from sparseflash import distributed

# ---------------------------------------------------------------------- in the processes


def forward(member, mask, q, k, v, plan_options, options):
    """This rank's results on the CPU; q, k and v are whole, and its part is kept for `backward`."""
    plan = distributed.shard(mask, member.group, **plan_options)
    local = [
        plan.scatter(x.detach().to(member.device), side=side).requires_grad_(x.requires_grad)
        for x, side in ((q, "queries"), (k, "keys"), (v, "keys"))
    ]
    out, lse = distributed.attention(*local, plan, return_lse=True, **options)
    member.kept["graph"] = out, lse, local, plan
    return out.detach().cpu(), lse.detach().cpu()


def backward(member, dout, dlse):
    """This rank's gradients, of q, k and v."""
    out, lse, local, plan = member.kept["graph"]
    results, given = [out], [plan.scatter(dout.to(member.device))]
    if dlse is not None:
        results.append(lse)
        given.append(plan.scatter(dlse.to(member.device), dim=-1))
    return [gradient.cpu() for gradient in torch.autograd.grad(results, local, given)]


def sent(member):
    """Bytes and messages that this rank sent since the last `forward`."""
    plan = member.kept["graph"][3]
    return plan.sent.bytes, plan.sent.messages


# ---------------------------------------------------------------------- in the test


def joined(parts, plan, side, dim=-2):
    """The whole tensor of what lies on each rank."""
    shards = plan.queries if side == "queries" else plan.keys
    whole = torch.cat(parts, dim)
    return torch.empty_like(whole).index_copy_(dim, shards.order, whole)


class Sharded(torch.autograd.Function):
    """`(out, lse)` of attention in `ranks` processes, as a differentiable function of whole tensors."""

    @staticmethod
    def forward(ctx, q, k, v, pool, ranks, mask, plan_options, options):
        plan = distributed.shard(mask, ranks=ranks, **plan_options)
        parts = pool.run(ranks, forward, mask, q, k, v, plan_options, options)
        ctx.pool, ctx.plan, ctx.ranks = pool, plan, ranks
        ctx.set_materialize_grads(False)
        outs, lses = zip(*parts, strict=True)
        return joined(outs, plan, "queries"), joined(lses, plan, "queries", -1)

    @staticmethod
    def backward(ctx, dout, dlse):
        parts = ctx.pool.run(ctx.ranks, backward, dout, dlse)
        sides = ("queries", "keys", "keys")
        whole = [joined(some, ctx.plan, side) for some, side in zip(zip(*parts, strict=True), sides, strict=True)]
        return *whole, *(None,) * 5


def sharded(pool, ranks, mask, plan_options=None, **options):
    """A function of q, k and v that returns `(out, lse)` of the attention in several processes."""
    return lambda q, k, v: Sharded.apply(q, k, v, pool, ranks, mask, plan_options or {}, options)
