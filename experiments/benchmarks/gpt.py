"""`python -m experiments.benchmarks.gpt`: training steps of GPT-2, with each attention and beside Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.benchmarks.harness import (
    Bench,
    Commit,
    Device,
    Minutes,
    Out,
    Rounds,
    Unavailable,
    Way,
    chosen,
    deadline,
)
from experiments.benchmarks.speed.peers import flashattention4
from experiments.lm import flops, patterns
from experiments.lm.model.attention import Attention, attention_over
from experiments.lm.model.transformer import LanguageModel, Sizes
from experiments.lm.steps import AccumulatingSteps
from experiments.lm.steps import Batch as Tokens
from experiments.training.optimizer import adamw, apply_gradients

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

# GPT-2's: learned positions, heads of 64 features.
SIZES = {"small": (12, 768, 64, 50_304), "medium": (24, 1024, 64, 50_304), "tiny": (2, 64, 32, 512)}
CONTEXTS = (1024, 4096, 16_384, 65_536)
WINDOW, BLOCK = 1024, 128
OURS = {"sparseflash": "dense", "sparseflash-window": "local", "sparseflash-window-butterfly": "local|butterfly"}
WAYS = (*OURS, "sdpa", "fa4", "fa4-window", "hugging-face")
# Weights stay as they are, so that every step computes the same and ways can be compared.
LR = 0.0
# Above every norm: the norm costs what it costs, but the biases that ours lacks change no gradient.
CLIP = 1e4


@dataclass(frozen=True)
class Case:
    size: str
    context: int
    tokens: int = 65_536  # of a step
    window: int = WINDOW
    block: int = BLOCK

    @property
    def name(self) -> str:
        return f"{self.size}-{self.context}"

    @property
    def sizes(self) -> Sizes:
        depth, width, head_dim, vocabulary = SIZES[self.size]
        return Sizes(depth, width, head_dim, vocabulary, self.context, "learned")

    @property
    def batch(self) -> int:
        return max(1, self.tokens // self.context)


@dataclass
class Models:
    case: Case
    device: torch.device
    steps: dict[str, Callable[[], Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        on_gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        with self.device:
            self.model = LanguageModel(
                self.case.sizes, [], dtype=self.dtype, compiling="block" if on_gpu else "none"
            )  # fmt: skip
        shape = self.case.batch, self.case.context + 1
        self.tokens = torch.randint(self.case.sizes.vocabulary, shape, device=self.device)

    def step(self, name: str) -> Tensor:
        if name not in self.steps:
            make = self.hugging_face if name == "hugging-face" else self.own
            self.steps[name] = make(name)
        return self.steps[name]()

    def own(self, name: str) -> Callable[[], Tensor]:
        model, optimizer = self.model, adamw(self.model, LR, 0.1, (0.9, 0.95))
        steps = AccumulatingSteps(model, optimizer, self.device, part=self.case.batch, clip=CLIP)
        attentions, batch = (self.attention(name),) * self.case.sizes.depth, Tokens(self.tokens)

        def step() -> Tensor:
            model.attentions = attentions
            steps(batch, LR)
            return gradient(model.blocks[0].qkv.weight).to(self.dtype)  # type: ignore[union-attr,arg-type]

        return step

    def attention(self, name: str) -> Attention:
        if name in OURS:
            return attention_over(self.mask(name).to(self.device), "sparseflash")
        if name == "sdpa":
            return attention_over(self.mask("sparseflash").to(self.device), "sdpa")
        window = {"window_size": (self.case.window - 1, 0)} if name == "fa4-window" else {}
        return flashattention4.call(causal=True, **window)

    def mask(self, name: str) -> Any:
        case = self.case
        heads = case.sizes.heads
        return patterns.of_layer(OURS[name], heads, case.context, window=case.window, block=case.block)

    def hugging_face(self, name: str) -> Callable[[], Tensor]:
        """Transformers' GPT-2 in bf16 by autocast, with its SDPA attention and compiled as a whole."""
        model = hugging_face_model(self.model).to(self.device)
        call = torch.compile(model, dynamic=False) if self.device.type == "cuda" else model
        optimizer = adamw(model, LR, 0.1, (0.9, 0.95))
        ids, labels = self.tokens[:, :-1], self.tokens[:, 1:]

        def step() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
                logits = call(input_ids=ids, use_cache=False).logits
            F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            apply_gradients(optimizer, LR)
            return gradient(model.transformer.h[0].attn.c_attn.weight).T.to(self.dtype)

        return step

    def flops(self, name: str) -> float:
        same = {"fa4-window": "sparseflash-window"}.get(name, name if name in OURS else "sparseflash")
        sizes, mask = self.case.sizes, self.mask(same)
        live = flops.live_scores([mask] * sizes.depth, sizes.heads)
        a_token = flops.of_token(sizes.weights, sizes.head_dim, live, self.case.context)
        return a_token * self.case.batch * self.case.context


def gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def hugging_face_model(model: LanguageModel) -> Any:
    """GPT-2 of Transformers with a model's weights; its biases, which the model lacks, are 0."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as failure:
        raise Unavailable(f"transformers is not installed: {failure}") from failure
    sizes = model.sizes
    config = GPT2Config(
        vocab_size=sizes.padded_vocabulary, n_positions=sizes.context, n_embd=sizes.width, n_layer=sizes.depth,
        n_head=sizes.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa",
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    made = GPT2LMHeadModel(config)
    assert model.places is not None
    weights = {"transformer.wte": model.embedding, "transformer.wpe": model.places, "transformer.ln_f": model.norm}
    for number, block in enumerate(model.blocks):
        names = {
            "ln_1": block.attention_norm, "attn.c_attn": block.qkv, "attn.c_proj": block.out,
            "ln_2": block.mlp_norm, "mlp.c_fc": block.up, "mlp.c_proj": block.down,
        }  # fmt: skip
        weights |= {f"transformer.h.{number}.{name}": layer for name, layer in names.items()}  # type: ignore[misc]
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            else:
                own = weights[name.removesuffix(".weight")].weight
                assert isinstance(own, Tensor)
                # Transformers multiplies by the transposed matrix.
                parameter.copy_(own.T if parameter.shape != own.shape or ".c_" in name else own)
    return made


def ways_of(models: Models, names: list[str]) -> dict[str, Way]:
    case, ways = models.case, {}
    for name in names:
        if case.window >= case.context and "window" in name:
            continue
        like = None if name in OURS else "sparseflash-window" if name == "fa4-window" else "sparseflash"
        if like not in (None, *names):
            raise typer.BadParameter(f"--way {name} is compared with {like}: name it, too.")
        settings = {"flops": models.flops(name), "items": case.batch * case.context, "batch": case.batch}
        ways[f"step/{name}"] = Way(
            partial(models.step, name), settings=settings, like=like and f"step/{like}", peer=True
        )
    return ways


@app.command()
def gpt(
    size: Annotated[list[str] | None, typer.Option(help="small or medium; may be repeated.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens of a sequence; may be repeated.")] = None,
    way: Annotated[list[str] | None, typer.Option(help=f"From {', '.join(WAYS)}; may be repeated.")] = None,
    tokens: Annotated[int, typer.Option(help="Of a step.", min=1)] = 65_536,
    minutes: Minutes = None,
    rounds: Rounds = 2,
    device: Device = "cuda",
    out: Out = Path("runs/gpt"),
    commit: Commit = None,
) -> None:
    """Time whole training steps of GPT-2 small and medium: forward, backward, clipping and AdamW, in bf16.

    Dense causal attention, a window of 1,024 tokens, and the window with a butterfly; SDPA and FlashAttention-4 in the
    same model; and Hugging Face's GPT-2, compiled. The gradients of the first projections are compared first. The same
    command goes on with the cases that --out lacks. mfu: the share of the device's peak, which is known for a GPU.
    """
    names = chosen("--way", way, WAYS)
    bench = Bench.start("gpt", device, commit, out, rounds=rounds, round_ms=100.0, packages=("transformers",))
    small = bench.device.type == "cpu"
    contexts = context or ([64, 128] if small else list(CONTEXTS))
    sizes = chosen("--size", size, ["tiny"] if small else ["small", "medium"])
    of_all = {"window": 64, "block": 32, "tokens": 128} if small else {"tokens": tokens}
    bench.resume()
    known, late = {each.name.split("/")[1] for each in bench.measurements}, deadline(minutes)
    cases = [Case(each, length, **of_all) for each in sizes for length in contexts]
    for case in (each for each in cases if each.name not in known):
        if late():
            print(f"{case.name}: out of time; the same command goes on", flush=True)
            continue
        torch.compiler.reset()
        ways = ways_of(Models(case, bench.device), names)
        timings = bench.time(case.name, ways)
        add_mfu(bench, case, ways, {name: each.ms for name, each in timings.items() if each.failure is None})
        del ways
        if not small:
            torch.cuda.empty_cache()
    bench.finish()


def add_mfu(bench: Bench, case: Case, ways: dict[str, Way], ms: dict[str, float]) -> None:
    top = flops.peak(bench.device)
    for name, took in ms.items():
        if top is not None:
            share = 100 * ways[name].settings["flops"] / (took / 1e3) / top
            bench.add(f"{case.name}/mfu/{name.removeprefix('step/')}", share, "%")
    bench.save()


if __name__ == "__main__":
    app()
