import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from sparseflash import attention, distributed, masks
from tests.processes.forked import ROOT, execute, ranks
from tests.processes.pool import Processes


@pytest.fixture(scope="module")
def pool():
    with Processes(4) as processes:
        yield processes


class Layer(nn.Module):
    def __init__(self, dropout_p=0.0):
        super().__init__()
        self.dropout_p = dropout_p
        self.into, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x, place):
        q, k, v = self.into(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        if isinstance(place, distributed.ShardPlan):
            found = distributed.attention(q, k, v, place, dropout_p=self.dropout_p)
        else:
            found = attention(q, k, v, place, dropout_p=self.dropout_p)
        return x + self.out(found.transpose(1, 2).flatten(2))


def model_and_data(batch=4, dropout_p=0.0):
    torch.manual_seed(0)
    return Layer(dropout_p), torch.randn(batch, 96, 16), masks.causal(96, block=16)


def gradients_alone(dropout_p=0.0):
    model, x, mask = model_and_data(dropout_p=dropout_p)
    out = model(x, mask)
    (out**2).sum().backward()
    return [parameter.grad for parameter in model.parameters()], out.detach()


def summed(gradients, group):
    for gradient in gradients:
        dist.all_reduce(gradient, group=group)
    return gradients


def with_plan(member, way, dropout_p):
    """The first rank draws the dropout of a single process."""
    model, x, mask = model_and_data(dropout_p=dropout_p)
    if member.rank > 0:
        torch.manual_seed(member.rank)
    plan = distributed.shard(mask, member.group)
    call = model
    if way == "checkpointing":

        def call(*arguments):
            return checkpoint(model, *arguments, use_reentrant=False)
    elif way == "reentrant checkpointing":

        def call(*arguments):
            return checkpoint(model, *arguments, use_reentrant=True)
    elif way == "torch.compile":
        call = torch.compile(model, backend="aot_eager")
    local = plan.scatter(x).requires_grad_()
    out = call(local, plan)
    (out**2).sum().backward()
    return summed([parameter.grad for parameter in model.parameters()], member.group), plan.gather(out.detach())


@pytest.mark.parametrize("way", ["plainly", "checkpointing", "reentrant checkpointing", "torch.compile"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_a_layer_has_the_gradients_of_one_process(pool, way, dropout_p):
    expected, whole = gradients_alone(dropout_p)
    for found, out in pool.run(2, with_plan, way, dropout_p):
        torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def on_a_mesh(member, wrap):
    """Two by two ranks: data parallel outside, context parallel inside."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model, x, mask = model_and_data()
    plan = distributed.shard(mask, mesh["cp"])
    if wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    share = x[mesh["dp"].get_local_rank() :: 2]
    out = model(plan.scatter(share), plan)
    ((out**2).sum() * mesh.size()).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in gradients]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_a_mesh_of_data_and_context_parallel_ranks(pool, wrap):
    expected, _ = gradients_alone()
    for found in pool.run(4, on_a_mesh, wrap):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def refuse_a_whole_mesh(member):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    with pytest.raises(
        ValueError, match=r"group must be a DeviceMesh of one dimension; got the dimensions \('dp', 'cp'\)"
    ):
        distributed.shard(masks.causal(96, block=16), mesh)


def test_a_mesh_of_two_dimensions_is_refused(pool):
    pool.run(4, refuse_a_whole_mesh)


def under_autocast(member):
    plan = distributed.shard(masks.causal(96, block=16), member.group)
    q = plan.scatter(torch.randn(1, 2, 96, 16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return distributed.attention(q, q, q, plan).dtype


def test_autocast_casts_as_it_does_in_one_process(pool):
    assert pool.run(2, under_autocast) == [torch.bfloat16] * 2


def plans_of_steps(member):
    first = distributed.shard(masks.causal(96, block=16), member.group)
    found = []
    for window in (5, 40):
        mask = masks.local(96, window=window, block=16)
        plan = distributed.shard(mask, member.group, like=first)
        assert torch.equal(plan.positions, first.positions)
        torch.manual_seed(0)
        q = torch.randn(1, 2, 96, 16)
        whole = plan.gather(distributed.attention(*(plan.scatter(q),) * 3, plan))
        found.append((whole, attention(q, q, q, mask)))
    return found


def test_a_plan_like_another_leaves_tokens_where_they_are(pool):
    for steps in pool.run(3, plans_of_steps):
        for whole, expected in steps:
            torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)


def test_the_example_of_the_documentation_runs_in_two_processes_as_it_stands():
    text = (ROOT / "docs" / "pages" / "models" / "several-gpus.md").read_text(encoding="utf-8")
    example, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    first, second = ranks(execute, "-c", example, processes=2)
    assert "tokens over 2 ranks" in first
    assert second == ""
