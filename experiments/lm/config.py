from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from experiments.lm.model.attention import IMPLEMENTATIONS
from experiments.lm.model.transformer import Sizes
from experiments.lm.patterns import has_choices
from experiments.lm.presets import settings_of
from experiments.training import run_folder
from experiments.training.lr_schedule import SCHEDULES
from experiments.training.settings import PRECISIONS, check_at_least, check_one_of, help_texts, setting
from experiments.training.shared_sequences import check_shareable

COMPILED = ("none", "block", "model")
DOCUMENTS = ("joined", "separate")
SHARDING = ("ddp", "fsdp")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The defaults are GPT-2's smallest size."""

    depth: int = setting(12, "Layers.")
    width: int = setting(768, "Features of each token.")
    head_dim: int = setting(128, "Features of each head; 64 is GPT-2's, 128 is faster.")
    kv_heads: int | None = setting(
        None,
        "Heads of keys and values. Each serves a group of query heads, which msa and nsa give one choice of blocks.",
        "as many as query heads",
    )
    context: int = setting(2048, "Tokens of a sequence.")
    positions: str = setting("rotary", "rotary or learned.")
    vocabulary: int = setting(50_304, "Maximum number of distinct tokens; 256: bytes.")

    pattern: str = setting(
        "dense",
        "dense, local, butterfly or bigbird; moba, msa or nsa, blocks that each query chooses at every step; a pattern "
        "of the library, 'streaming(n, window=64, sink=4)' for n tokens; or yours, mine.py:rule. | joins patterns, / "
        "separates groups of heads, commas separate alternating layers: 'local,dense' or 'local|butterfly'. Keys after "
        "their query are dropped.",
    )
    window: int = setting(1024, "Tokens of the local window, the query included.")
    block: int = setting(128, "Block size of the masks.")
    documents: str = setting(
        "joined", "joined: a token sees earlier documents of its sequence; separate: only its own."
    )
    attention: str = setting("sparseflash", "sparseflash, sdpa or flex.")

    initial: str | None = setting(
        None,
        "Initial weights: the folder of a finished run of the same sizes and vocabulary, such as a run with a shorter "
        "context.",
        "random weights",
    )
    batch_tokens: int = setting(524_288, "Tokens of a step, over all processes.")
    micro_tokens: int = setting(
        65_536, "Tokens of one forward and backward in one process; a step accumulates several."
    )
    lr: float = setting(6e-4, "Peak learning rate.")
    schedule: str = setting("cosine", f"{', '.join(SCHEDULES)}.")
    warmup: int = setting(100, "Steps until the peak.")
    weight_decay: float = setting(0.1, "AdamW weight decay of the matrices.")
    beta2: float = setting(0.95, "AdamW's decay of squared gradients.")
    clip: float = setting(1.0, "Maximum norm of all gradients; 0: no clipping.")
    steps: int | None = setting(None, "Steps to train.", "no limit")
    minutes: float | None = setting(None, "Minutes to train, without validation and compilation.", "no limit")
    seed: int = setting(0, "Seed of the weights and of the sequences' order.")

    device: str = setting("auto", "cpu, cuda, cuda:1, ...; auto takes a GPU if PyTorch sees one.")
    precision: str = setting("bf16", "fp32, or bf16: matrix products in bfloat16, weights in float32.")
    compiled: str = setting("block", "What torch.compile compiles: none, block (each layer around attention) or model.")
    recorded: bool = setting(False, "On one GPU, record forward and backward as a CUDA graph, to save host time.")
    sharding: str = setting(
        "ddp", "With torchrun: ddp (weights in every process) or fsdp (sharded weights and optimiser, FSDP2)."
    )
    context_parallel: int = setting(
        1,
        "Processes that share the tokens of each sequence, for contexts too long for one GPU; the number of processes "
        "must be a multiple.",
    )
    recompute: bool = setting(
        False,
        "Keep only the input of each layer, and compute the layer again in the backward: a fraction of the memory for "
        "a third more work.",
    )
    validate_every: int = setting(250, "Steps between validations.")
    validation_tokens: int = setting(1_048_576, "Maximum tokens of a validation.")
    checkpoint_every: int = setting(1000, "Maximum steps between checkpoints; only the newest is kept.")
    log_every: int = setting(10, "Steps between log lines; each line is the mean over these steps.")

    def __post_init__(self) -> None:
        counts = (
            "depth", "width", "head_dim", "kv_heads", "context", "window", "block", "batch_tokens", "micro_tokens",
            "steps", "validate_every", "validation_tokens", "checkpoint_every", "log_every", "context_parallel",
        )  # fmt: skip
        check_at_least(self, 1, counts)
        check_at_least(self, 256, ("vocabulary",))
        check_at_least(self, 0, ("lr", "warmup", "weight_decay", "beta2", "clip", "minutes"))
        check_one_of("attention", self.attention, IMPLEMENTATIONS)
        check_one_of("documents", self.documents, DOCUMENTS)
        check_one_of("schedule", self.schedule, SCHEDULES)
        check_one_of("precision", self.precision, PRECISIONS)
        check_one_of("compiled", self.compiled, COMPILED)
        check_one_of("sharding", self.sharding, SHARDING)
        _ = self.sizes
        if self.compiled == "model" and self.recompute:
            raise ValueError("compiled must be block or none if layers are recomputed; got model")
        if self.recorded and self.documents == "separate":
            raise ValueError(
                "documents must be joined if steps are recorded as CUDA graphs, which read the same masks in every "
                "step; got separate: choose --no-recorded"
            )
        if has_choices(self.pattern):
            for name, allowed in (
                ("documents", ("joined",)), ("context_parallel", (1,)), ("recorded", (False,)), ("recompute", (False,)),
                ("compiled", ("none", "block")), ("attention", ("sparseflash",)),
            ):  # fmt: skip
                if getattr(self, name) not in allowed:
                    raise ValueError(
                        f"{name} must be {' or '.join(map(str, allowed))} if blocks are chosen at every step; got "
                        f"{getattr(self, name)} with the pattern {self.pattern}"
                    )
        if self.context_parallel > 1:
            self._check_shared_sequences()

    def _check_shared_sequences(self) -> None:
        check_shareable(
            processes=self.context_parallel, attention=self.attention, longest=self.context, block=self.block,
            length_option="--context",
        )  # fmt: skip
        if self.compiled == "model":
            raise ValueError(
                "compiled must be block or none if context_parallel is above 1; got model: attention over several "
                "processes cannot be an operator of one graph"
            )

    @property
    def sizes(self) -> Sizes:
        return Sizes(
            self.depth, self.width, self.head_dim, self.vocabulary, self.context, self.positions, self.kv_heads
        )  # fmt: skip

    @property
    def betas(self) -> tuple[float, float]:
        return 0.9, self.beta2

    @property
    def batch(self) -> int:
        return max(1, self.batch_tokens // self.context)

    @property
    def part(self) -> int:
        return max(1, self.micro_tokens * self.context_parallel // self.context)


HELP = help_texts(Config)
DEFAULTS: dict[str, Any] = {each.name: each.default for each in fields(Config)}

# They do not affect the weights, or change the run's length.
FREE_ON_RESUME = (
    "steps", "minutes", "device", "compiled", "recorded", "context_parallel", "recompute", "validate_every",
    "validation_tokens", "checkpoint_every", "log_every",
)  # fmt: skip


def configure(preset: str | None, chosen: Mapping[str, Any]) -> Config:
    return Config(**{**(settings_of(preset) if preset else {}), **chosen})


def resumed(saved: Config, chosen: dict[str, Any]) -> Config:
    return run_folder.resumed(saved, chosen, FREE_ON_RESUME)


def as_dict(config: Config) -> dict[str, Any]:
    return asdict(config)
