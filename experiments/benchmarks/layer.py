"""`python -m experiments.benchmarks.layer`: a training step of one compiled transformer layer, with each attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.benchmarks.harness import Bench, Commit, Device, Out, Rounds, Seed, Way
from experiments.benchmarks.speed.cases import Case, select
from experiments.benchmarks.speed.patterns import pattern
from experiments.benchmarks.speed.peers import PEERS, named, runner_of
from experiments.benchmarks.speed.peers.runner import Runner
from experiments.benchmarks.speed.run import OURS, make_inputs

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
# Dynamo cannot trace their kernels.
CASES = "d*-dense,d*-causal,d*-butterfly,d*-local,d*-bigbird,d*-random12"
TIMED = "flex,fa4,fa4-deterministic,sdpa-cudnn,sdpa-fa2"
NOT_TRACED = ("fa4", "fa4-deterministic", "cudnn-sparse")


class Layer(nn.Module):
    """Attention, then an MLP four times as wide, each after a norm and added to its input.

    attend: q, k, v [B, H, N, D] to the same shape; they are views of [B, N, 3, H, D].
    """

    def __init__(self, heads: int, dim: int, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        width = heads * dim
        self.heads, self.dim, self.attend = heads, dim, attend
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        split = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, self.dim)
        q, k, v = (each.transpose(1, 2) for each in split.unbind(2))
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, tokens, width))
        result: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return result


def compiled(layer: Layer, peer: str) -> Callable[[Tensor], Tensor]:
    if peer in NOT_TRACED:
        layer.attend = torch.compiler.disable(layer.attend)
    made: Callable[[Tensor], Tensor] = torch.compile(layer, fullgraph=peer not in NOT_TRACED, dynamic=False)
    return made


@dataclass(frozen=True)
class Step:
    layer: Layer
    call: Callable[[Tensor], Tensor]
    x: Tensor
    dout: Tensor

    def __call__(self) -> Tensor:
        self.layer.zero_grad(set_to_none=True)
        self.x.grad = None
        self.call(self.x).backward(self.dout)
        found = self.layer.qkv.weight.grad
        assert found is not None
        return found


def step_of(name: str, runner: Runner, case: Case, device: torch.device, seed: int) -> Step:
    """Weights and inputs depend on the case and the seed alone."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # `to_bhnd` is its own inverse. The context chooses SDPA's backend while a graph is traced; outside of the graph
        # Dynamo would not see it, and would give the second backend the graph of the first.
        with runner.context():
            return runner.to_bhnd(runner.call(*map(runner.to_bhnd, (q, k, v))))

    torch.manual_seed(seed)
    with device:
        layer = Layer(case.heads, case.head_dim, attend).to(case.dtype)
        shape = case.batch, case.length, case.heads * case.head_dim
        x, dout = (torch.randn(shape, dtype=case.dtype) for _ in range(2))
    return Step(layer, compiled(layer, name), x.requires_grad_(), dout)


def ways_of(case: Case, peers: tuple[str, ...], device: torch.device, seed: int) -> dict[str, Way]:
    live = pattern(case, device)
    inputs = make_inputs(case, device, seed)
    steps: dict[str, Step] = {}

    def step(name: str) -> Tensor:
        if name not in steps:
            runner = runner_of(name, case, live, inputs)
            steps[name] = step_of(name, runner, case, device, seed)
        return steps[name]()

    return {
        name: Way(lambda name=name: step(name), settings=case.settings, like=OURS, peer=True) for name in (OURS, *peers)
    }


@app.command()
def layer(
    cases: Annotated[str, typer.Option(help="Globs over the names of the cases of `speed`.")] = CASES,
    peers: Annotated[str, typer.Option(help="With commas; none: ours alone.")] = TIMED,
    length: Annotated[int | None, typer.Option(help="Tokens, in blocks of 32.", show_default="the case's")] = None,
    rounds: Rounds = 3,
    device: Device = "cuda",
    out: Out = Path("runs/layer"),
    seed: Seed = 0,
    commit: Commit = None,
) -> None:
    """Time a forward and a backward pass of one compiled transformer layer, with each attention in turns.

    RMSNorm, projections, attention, an MLP four times as wide, bf16 weights, 16,384 tokens of 2,048 channels. The
    gradients that come through attention are compared with ours first. An estimated ten minutes of an H100.
    """
    names, chosen = named(peers, [name for name in PEERS if name != "flex-autotune"]), select(cases)
    if device == "cpu" and length is None:
        raise typer.BadParameter("--device cpu must have a small --length, such as 256.")
    bench = Bench.start("layer", device, commit, out, seed=seed, rounds=rounds, round_ms=200.0)
    for case in chosen:
        sized = case if length is None else case.shrunk(length, 32)
        torch.compiler.reset()  # otherwise the limit of recompilations is reached
        bench.time(f"{case.path}/step", ways_of(sized, names, bench.device, seed))
    bench.finish()


if __name__ == "__main__":
    app()
