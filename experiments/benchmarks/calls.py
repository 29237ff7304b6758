"""`python -m experiments.benchmarks calls`: the host overhead of a call, beside PyTorch's own attention.

One small shape, so that the GPU finishes before the host.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest import mock

import torch
import typer
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexMask
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import sparseflash
from experiments.benchmarks.fresh_process import answer_of
from experiments.benchmarks.harness import Bench, Commit, Out, Rounds, Way
from experiments.benchmarks.timing import first_call
from sparseflash import masks

# The calls, in the order of the table. All but the last five have a causal mask made before.
INFERENCE = "inference"
FORWARD = "forward-gradients-wanted"  # the graph is made, and dropped
BOTH = "forward-and-backward"
# The backward runs in the calling thread instead of an autograd thread.
BOTH_HERE = "forward-and-backward-one-thread"
# Ours: `mask.with_lengths(new)`; SDPA: a Boolean mask; FlexAttention: `create_block_mask` of a rule that reads them.
LENGTHS = "new-lengths-and-a-call"
# Ours: `masks.causal(n)`; SDPA: `is_causal=True`; FlexAttention: `create_block_mask(causal)`.
MASK = "new-causal-mask-and-a-call"
# A mask that differs at every call. Ours: `masks.local`; SDPA: a Boolean mask; FlexAttention: `create_block_mask` of a
# rule that reads the window.
WINDOW = "another-window-and-a-call"
# Ours: `masks.top_k_blocks`; FlexAttention: `topk` and `BlockMask.from_kv_blocks`, in blocks of 128; SDPA has no
# blocks.
CHOICE = "top-k-blocks-and-a-call"
WAYS = (INFERENCE, FORWARD, BOTH, BOTH_HERE, LENGTHS, MASK, WINDOW, CHOICE)
# Seconds in a new process: a forward and backward, then another with a second head dim, then inference with a third.
FIRST_CALLS = ("first-forward-and-backward", "the-same-of-another-head-dim", "inference-a-third-head-dim")

OURS, SDPA, FLEX = "sparseflash", "sdpa", "flex"
THROUGH_TRITON = "sparseflash-by-tritons-launcher"  # only on request
FLEX_BLOCK = 128  # its kernels refuse smaller blocks unless their tile sizes are also reduced by hand


class Shape(NamedTuple):
    """Tensors in bf16, with `block` tokens in a tile and `chosen` blocks in a row in CHOICE."""

    batch: int = 1
    heads: int = 4
    tokens: int = 256
    dim: int = 64
    block: int = 64
    chosen: int = 2

    def tensor(self, device: torch.device) -> Tensor:
        return torch.randn(self.batch, self.heads, self.tokens, self.dim, device=device, dtype=torch.bfloat16)

    def scores(self, device: torch.device) -> Tensor:
        blocks = -(-self.tokens // self.block)
        return torch.randn(self.batch, self.heads, blocks, blocks, device=device)


Call = Callable[[], object]
# The fourth tensor: lengths, or scores of blocks, new in each call.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
AttentionOver = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
AttentionIn = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class Implementation(NamedTuple):
    causal: Attention
    with_lengths: AttentionOver
    newly_causal: Attention
    in_window: AttentionIn
    chosen: AttentionOver | None


def calls_of(implementation: Implementation, shape: Shape, device: torch.device) -> dict[str, Call]:
    q, k, v, dout = (shape.tensor(device) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    size = (shape.batch,)
    lengths = cycle([torch.randint(1, shape.tokens, size, dtype=torch.int32, device=device) for _ in range(512)])
    windows = cycle(range(1, shape.tokens + 1))
    scores = shape.scores(device)

    def without_gradients(call: Call) -> Call:
        def run() -> None:
            with torch.no_grad():
                call()

        return run

    def both() -> None:
        torch.autograd.grad(implementation.causal(*leaves), leaves, dout)

    def both_here() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            both()

    calls: dict[str, Call] = {
        INFERENCE: without_gradients(lambda: implementation.causal(q, k, v)),
        FORWARD: lambda: implementation.causal(*leaves),
        BOTH: both,
        BOTH_HERE: both_here,
        LENGTHS: without_gradients(lambda: implementation.with_lengths(q, k, v, next(lengths))),
        MASK: without_gradients(lambda: implementation.newly_causal(q, k, v)),
        WINDOW: without_gradients(lambda: implementation.in_window(q, k, v, next(windows))),
    }
    if (chosen := implementation.chosen) is not None:
        calls[CHOICE] = without_gradients(lambda: chosen(q, k, v, scores))
    return calls


def sparseflash_calls(shape: Shape, device: torch.device) -> Implementation:
    """A mask with a known rule is built on the CPU and copied."""
    n, block = shape.tokens, shape.block
    standing = masks.causal(n, block=block).to(device)

    def chosen(q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> Tensor:
        mask = masks.top_k_blocks(scores, k=shape.chosen, q_len=n, block=block, causal=True, local_blocks=1)
        return sparseflash.attention(q, k, v, mask)

    return Implementation(
        lambda q, k, v: sparseflash.attention(q, k, v, standing),
        lambda q, k, v, lengths: sparseflash.attention(q, k, v, standing.with_lengths(lengths)),
        lambda q, k, v: sparseflash.attention(q, k, v, masks.causal(n, block=block).to(device)),
        lambda q, k, v, window: sparseflash.attention(
            q, k, v, masks.local(n, window=window, causal=True, block=block).to(device)
        ),
        chosen,
    )


def sdpa_calls(shape: Shape, device: torch.device) -> Implementation:
    tokens = torch.arange(shape.tokens, device=device)
    lower = torch.ones(shape.tokens, shape.tokens, dtype=torch.bool, device=device).tril()

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    def with_lengths(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        live = lower & (tokens < lengths[:, None])[:, None, None, :]
        return scaled_dot_product_attention(q, k, v, live)

    def in_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        return scaled_dot_product_attention(q, k, v, lower & (tokens[:, None] - tokens < window))

    return Implementation(causal, with_lengths, causal, in_window, None)


def flex_calls(shape: Shape, device: torch.device) -> Implementation:
    """Compiled, with its default block size; masks are made eagerly, as in its documentation."""
    n, block = shape.tokens, FLEX_BLOCK
    attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    blocks = -(-n // block)

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= q

    def mask_of(rule: Callable[..., Tensor], batch: int | None = None) -> FlexMask:
        return create_block_mask(rule, batch, None, n, n, device=device, BLOCK_SIZE=block)

    standing = mask_of(rule)
    current = torch.empty(shape.batch, dtype=torch.int32, device=device)

    def rule_with_lengths(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k < current[b])

    def with_lengths(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        current.copy_(lengths)
        return attend(q, k, v, block_mask=mask_of(rule_with_lengths, shape.batch))

    current_window = torch.empty((), dtype=torch.int32, device=device)

    def rule_with_window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q - k < current_window)

    def in_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        current_window.fill_(window)
        return attend(q, k, v, block_mask=mask_of(rule_with_window))

    causal_blocks = torch.ones(blocks, blocks, dtype=torch.bool, device=device).tril()
    own = torch.eye(blocks, dtype=torch.bool, device=device)

    def chosen(q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> Tensor:
        scores = scores[..., :blocks, :blocks]
        ranked = scores.masked_fill(~causal_blocks, -torch.inf).masked_fill(own, torch.inf)
        best = ranked.topk(min(shape.chosen, blocks)).indices.int()
        indices = torch.zeros(*scores.shape, dtype=torch.int32, device=device)
        indices[..., : best.shape[-1]] = best
        counts = causal_blocks.sum(-1, dtype=torch.int32).clamp(max=shape.chosen).expand(scores.shape[:-1])
        mask = FlexMask.from_kv_blocks(counts, indices, BLOCK_SIZE=block, mask_mod=rule, seq_lengths=(n, n))
        return attend(q, k, v, block_mask=mask)

    return Implementation(
        lambda q, k, v: attend(q, k, v, block_mask=standing),
        with_lengths,
        lambda q, k, v: attend(q, k, v, block_mask=mask_of(rule)),
        in_window,
        chosen,
    )


IMPLEMENTATIONS_OF = {OURS: sparseflash_calls, SDPA: sdpa_calls, FLEX: flex_calls}


def through_triton() -> AbstractContextManager[Any]:
    from sparseflash.backends.triton.launcher import Variant

    return mock.patch.object(Variant, "can_start_directly", lambda variant: False)


def record_first_calls(bench: Bench, name: str, *, limit: float = 240.0) -> None:
    seconds: dict[str, float] = {}
    failure = ""
    try:
        seconds = answer_of(seconds_of, name, limit=limit)
    except RuntimeError as failed:
        failure = str(failed)
    for what in FIRST_CALLS:
        bench.add(f"{what}/{name}", seconds.get(what), "s", failure=failure)
    bench.save()


def seconds_of(name: str) -> dict[str, float]:
    device = torch.device("cuda")
    # What all of them share is loaded first: the device, its libraries, and sympy, which PyTorch imports in the
    # first `torch.autograd.grad` that is given a gradient (1.7 s).
    x = torch.ones(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    torch.autograd.grad(x @ x, x, torch.ones_like(x))
    seconds = {}
    for what, dim, way in zip(FIRST_CALLS, (64, 32, 128), (BOTH, BOTH, INFERENCE), strict=True):
        call = calls_of(IMPLEMENTATIONS_OF[name](Shape(dim=dim), device), Shape(dim=dim), device)[way]
        seconds[what], _ = first_call(call, device)
    return seconds


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def calls(
    batch: Annotated[int, typer.Option(help="Sequences of a call.", min=1)] = 1,
    heads: Annotated[int, typer.Option(help="Of queries, keys and values.", min=1)] = 4,
    tokens: Annotated[int, typer.Option(help="Queries and keys of a sequence.", min=16)] = 256,
    dim: Annotated[int, typer.Option(help="Head dim.", min=16, max=256)] = 64,
    block: Annotated[int, typer.Option(help="Tokens a tile of the mask.", min=16, max=128)] = 64,
    rounds: Rounds = 15,
    count: Annotated[int, typer.Option(help="Calls a turn.", min=1)] = 100,
    first: Annotated[bool, typer.Option(help="Also the first calls of new processes; a minute.")] = True,
    launcher: Annotated[bool, typer.Option(help="Also time our kernels through Triton's own launcher.")] = False,
    commit: Commit = None,
    out: Out = Path("runs/calls"),
) -> None:
    """Host microseconds of short calls in bf16: sparseflash, SDPA and FlexAttention in turns. It takes two minutes."""
    bench = Bench.start("calls", "cuda", commit, out, rounds=rounds)
    shape = Shape(batch, heads, tokens, dim, block)
    made = {name: calls_of(implementation(shape, bench.device), shape, bench.device)
            for name, implementation in IMPLEMENTATIONS_OF.items()}  # fmt: skip
    if launcher:
        made[THROUGH_TRITON] = made[OURS]
    contexts = {THROUGH_TRITON: through_triton}
    for way in WAYS:
        ways = {
            name: Way(of_way[way], contexts.get(name, nullcontext), shape._asdict(), peer=True)
            for name, of_way in made.items() if way in of_way
        }  # fmt: skip
        bench.time(way, ways, host_calls=count)
    for name in IMPLEMENTATIONS_OF if first else ():
        record_first_calls(bench, name)
    bench.finish()


if __name__ == "__main__":
    app()
