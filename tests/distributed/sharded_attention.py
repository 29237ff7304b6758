"""`sparseflash.distributed.attention` in several processes as one function of whole tensors."""

import torch

from sparseflash import distributed, masks
from tests.compared import exactness
from tests.compared.closeness import Results
from tests.compared.scored import check_results
from tests.distributed.shared_files import copies_of_files

# ---------------------------------------------------------------------- in the processes


def planned(member, mask, options):
    plan = distributed.shard(mask, member.group, **options)
    if plan.transport == "peer" and member.device.type == "cpu":
        copies = member.kept.setdefault("copies", copies_of_files(member.group))
        plan.transport_on = lambda device: copies
    return plan


def forward(member, mask, q, k, v, plan_options, options):
    plan = planned(member, mask, plan_options)
    local = [
        plan.scatter(x.detach().to(member.device), side=side).requires_grad_(x.requires_grad)
        for x, side in ((q, "queries"), (k, "keys"), (v, "keys"))
    ]
    out, lse = distributed.attention(*local, plan, return_lse=True, **options)
    member.kept["graph"] = out, lse, local, plan
    return out.detach().cpu(), lse.detach().cpu()


def backward(member, dout, dlse):
    out, lse, local, plan = member.kept["graph"]
    results, given = [out], [plan.scatter(dout.to(member.device))]
    if dlse is not None:
        results.append(lse)
        given.append(plan.scatter(dlse.to(member.device), dim=-1))
    return [gradient.cpu() for gradient in torch.autograd.grad(results, local, given)]


def several_calls(member, options):
    results = []
    for tokens, more in ((100, {"stages": 3}), (300, {"stages": 0}), (70, {}), (300, {"stages": 2})):
        more = more if options["strategy"] == "keys" else {}
        plan = planned(member, masks.causal(tokens, block=16), {**options, **more})
        generator = torch.Generator().manual_seed(tokens)
        whole = [torch.randn(1, heads, tokens, 16, generator=generator) for heads in (4, 2, 2)]
        inputs = [plan.scatter(x.to(member.device)).requires_grad_() for x in whole]
        outs = [distributed.attention(*inputs, plan) for _ in range(3)]
        results += [*outs, *torch.autograd.grad(sum(out.square().sum() for out in outs), inputs)]
    return [x.detach().cpu() for x in results]


def scored_results(member, case, plan_options, options):
    problem = case.problem
    *whole, dout, dlse = problem.tensors(member.device)
    changes, learned = case.changes(member.device, case.dtype)
    plan = planned(member, problem.mask, plan_options)
    local = [
        plan.scatter(x.detach(), side=side).requires_grad_()
        for x, side in zip(whole, ("queries", "keys", "keys"), strict=True)
    ]
    results = distributed.attention(
        *local, plan, scale=problem.scale, return_lse=True, dropout_p=problem.dropout_p, seed=problem.seed,
        scores=changes, **options,
    )  # fmt: skip
    given = plan.scatter(dout), plan.scatter(dlse, dim=-1)
    found = torch.autograd.grad(results, (*local, *learned), given)
    return [x.detach().cpu() for x in (*results, *found)]


def sent(member):
    plan = member.kept["graph"][3]
    return plan.sent.bytes, plan.sent.messages


# ---------------------------------------------------------------------- in the test


def joined(parts, plan, side, dim=-2):
    shards = plan.queries if side == "queries" else plan.keys
    whole = torch.cat(parts, dim)
    return torch.empty_like(whole).index_copy_(dim, shards.order, whole)


class Sharded(torch.autograd.Function):
    """`(out, lse)` in `ranks` processes, differentiable."""

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
    return lambda q, k, v: Sharded.apply(q, k, v, pool, ranks, mask, plan_options or {}, options)


def check_transports(pool, ranks, strategy):
    found = [
        pool.run(ranks, several_calls, {"strategy": strategy, "transport": name}) for name in ("collective", "peer")
    ]
    for some, others in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def check_dropping(pool, ranks, problem, plan_options, **options):
    options = {"scale": problem.scale, "dropout_p": problem.dropout_p, "seed": problem.seed, **options}
    q, k, v, dout, dlse = problem.tensors()
    out, lse = sharded(pool, ranks, problem.mask, plan_options, **options)(q, k, v)
    got = Results(out, lse, *torch.autograd.grad((out, lse), (q, k, v), (dout, dlse)))
    exactness.check_results(problem, got, "distributed")


def check_scored(pool, ranks, case, plan_options, **options):
    plan = distributed.shard(case.problem.mask, ranks=ranks, **plan_options)
    parts = list(zip(*pool.run(ranks, scored_results, case, plan_options, options), strict=True))
    out, lse, dq, dk, dv, *learned = parts
    got = {"out": joined(out, plan, "queries"), "lse": joined(lse, plan, "queries", -1)}
    got |= {"dq": joined(dq, plan, "queries"), "dk": joined(dk, plan, "keys"), "dv": joined(dv, plan, "keys")}
    got |= {f"d{number}": sum(x.double() for x in some) for number, some in enumerate(learned)}
    # The ranks' parts of a gradient may cancel, and are rounded at their own size.
    sizes = {f"d{number}": max(float(x.abs().max()) for x in some) for number, some in enumerate(learned)}
    check_results(case, got, magnitudes=sizes)
