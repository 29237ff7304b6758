"""Train a language model and validate it.

Besides the files of every run it writes metrics.json, run.png, positions.csv and tokenizer.json.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from experiments.lm import evaluate, flops, patterns
from experiments.lm.config import Config, as_dict
from experiments.lm.data.packing import Packing
from experiments.lm.data.store import Store
from experiments.lm.data.tokenizer import FILE
from experiments.lm.document_masks import DocumentMasks
from experiments.lm.model.attention import Attention, attention_over
from experiments.lm.model.chosen import ChosenBlocks
from experiments.lm.model.shared_context import SharedContext
from experiments.lm.model.transformer import LanguageModel
from experiments.lm.steps import AccumulatingSteps, Batch, check_recordable
from experiments.training import tensor_files
from experiments.training.atomic_files import write_json
from experiments.training.distributed import SINGLE, Ranks, find_device
from experiments.training.environment import device_name, peak_memory, versions
from experiments.training.fingerprint import sha256
from experiments.training.optimizer import adamw
from experiments.training.reading import reading
from experiments.training.run_folder import SETTINGS, settings_as
from experiments.training.run_log import Record
from experiments.training.sharding import divided_like, shard, whole
from experiments.training.trainer import Cadence, Pause, Trainer, never
from experiments.training.window import Means
from sparseflash import BlockMask

KIND = "lm language model"


class Run(Trainer[Batch]):
    def __init__(
        self,
        config: Config,
        store: Store,
        folder: Path,
        *,
        resume: bool = False,
        overwrite: bool = False,
        ranks: Ranks = SINGLE,
    ) -> None:
        self.config, self.store = config, store
        device = find_device(config.device)
        ranks.check_context_parallel(config.context_parallel)
        ranks.check_batch(config.batch, "--batch-tokens")
        if config.recorded:
            check_recordable(device, ranks.count)
        if store.vocabulary > config.vocabulary:
            raise ValueError(
                f"--vocabulary must be at least the {store.vocabulary} tokens of the text in {store.folder}; got "
                f"{config.vocabulary}"
            )
        if config.attention == "flex" and device.type != "cuda":
            raise ValueError("--attention flex must have a GPU: FlexAttention has no gradients on CPUs")
        self.packing = Packing(store.train, config.context, config.batch, config.seed, ranks.share)
        self.masks = patterns.of_layers(
            config.pattern, config.depth, config.sizes.heads, config.context, window=config.window, block=config.block
        )
        fixed = cast("list[BlockMask]", self.masks)  # chosen blocks share no sequences and separate no documents
        # After `clear` they hold no plan with a process group.
        self.shared = shared = SharedContext(ranks, fixed) if ranks.mesh is not None else None

        def attention_of(mask: BlockMask | ChosenBlocks) -> Attention:
            return attention_over(mask.to(device), config.attention)

        self.documents = None
        if config.documents == "separate":
            once = attention_of if shared is None else shared.attention_once
            self.documents = DocumentMasks(fixed, once)
        self.flops_a_token = flops.of_token(
            config.sizes.weights, config.head_dim, flops.live_scores(self.masks, config.sizes.heads), config.context
        )
        torch.manual_seed(config.seed)
        of_layer = (
            attention_of
            if shared is None
            else cast("Callable[[BlockMask | ChosenBlocks], Attention]", shared.attention)
        )
        made = {id(mask): of_layer(mask) for mask in self.masks}
        model = LanguageModel(
            config.sizes,
            [made[id(mask)] for mask in self.masks],
            dtype=torch.bfloat16 if config.precision == "bf16" else torch.float32,
            compiling=config.compiled,
            recompute=config.recompute,
            shared=shared,
        ).to(device)
        if config.sharding == "fsdp" and ranks.count > 1:
            if config.compiled == "model":
                raise ValueError("--sharding fsdp gathers the weights of each layer: choose --compiled block or none")
            shard(model, model.blocks, model.dtype)
        super().__init__(
            folder,
            model,
            adamw(model, config.lr, config.weight_decay, config.betas),
            device,
            Cadence(config.log_every, config.validate_every, config.checkpoint_every),
            seed=config.seed,
            initial=config.initial,
            resume=resume,
            overwrite=overwrite,
            ranks=ranks,
        )

    @property
    def plan(self) -> Config:
        return self.config

    def settings(self) -> dict[str, Any]:
        return {"config": as_dict(self.config), "data": {"folder": str(self.store.folder), **self.store.about}}

    def check_resumable(self, saved: dict[str, Any]) -> None:
        if saved["data"]["hash"] != self.store.about["hash"]:
            raise ValueError(
                f"a resumed run must see the same tokens: those in {self.store.folder} differ from the ones that it "
                f"began with, in {saved['data']['folder']}; start another run with another --out"
            )

    def begin_from(self, path: Path) -> dict[str, Any]:
        found, about = tensor_files.read(path, KIND, "config", "steps")
        own = self.model.state_dict()
        with reading(path, f"a file of an {KIND} with its settings and its steps"):
            before = Config(**about["config"])
            tokens = int(about["steps"]) * before.batch * before.context
        # Layers that choose have weights that a model without them does not have.
        new = {name for name in own if ".choosing." in name and name not in found}
        own = {name: tensor for name, tensor in own.items() if name not in new}
        alike = {name: tensor.shape for name, tensor in found.items()} == {name: x.shape for name, x in own.items()}
        if not alike or before.head_dim != self.config.head_dim:
            raise ValueError(
                f"{path} must hold a model of this run's depth, width, head_dim, kv_heads, vocabulary and "
                "positions; learned ones of its context, too"
            )
        there, here = (_vocabulary(folder) for folder in (tensor_files.folder_of(path), self.store.folder))
        if there != here:
            raise ValueError(f"{path} must hold a model of the tokens in {self.store.folder}; its vocabulary differs")
        loaded = {name: divided_like(found[name], tensor) for name, tensor in own.items()}
        self.model.load_state_dict(loaded, strict=not new)
        return {
            "sha256": sha256(*tensor_files.files(path)),
            "pattern": before.pattern,
            "context": before.context,
            "tokens": tokens,
            "seconds": about.get("seconds"),
            "before": about.get("initial"),
        }

    @property
    def part(self) -> int:
        return min(self.config.part, self.config.batch // self.ranks.data_parallel_ranks)

    def train(self, pause: Pause = never) -> dict[str, Any] | None:
        with self.session():
            if not self.train_stage(self._batches(), self._steps(), pause):
                return None
            self.save()
            losses = self._validated()
        weights = {name: whole(tensor).cpu() for name, tensor in self.model.state_dict().items()}
        peak = self._peak_memory()
        return self.ranks.on_first(lambda: self._write_result(losses, weights, peak))

    def _peak_memory(self) -> int | None:
        found = [each for each in self.ranks.gather(peak_memory(self.device)) if each is not None]
        return max(found, default=None)

    def _steps(self) -> AccumulatingSteps:
        return AccumulatingSteps(
            self.model,
            self.optimizer,
            self.device,
            part=self.part,
            clip=self.config.clip,
            data_parallel=self.data_parallel,
            recorded=self.config.recorded,
        )

    def _batches(self) -> Iterator[Batch]:
        step = self.state.step
        while True:
            numbers = self.packing.numbers(step)
            attentions = () if self.documents is None else self.documents.of_parts(self.packing, numbers, self.part)
            yield Batch(torch.from_numpy(self.packing.rows(numbers)), attentions)
            step += 1

    def training_numbers(self, means: Means, seconds: float) -> Record:
        numbers: Record = {"tokens": self.state.step * self.config.batch * self.config.context}
        peak = self._peak_memory()
        if peak is not None:
            numbers["peak_memory"] = peak
        top = flops.peak(self.device)
        if top is not None and self.config.precision == "bf16":
            numbers["mfu"] = self.flops_a_token * means.tokens / seconds / (top * self.ranks.count)
        return numbers

    def validate(self) -> None:
        self._validated()

    def _validated(self) -> evaluate.Losses:
        found = evaluate.losses(
            self.data_parallel, self.store.val, self.config, self.device, self.ranks, self.documents, self.part
        )
        if not self.is_validated:
            self.record({
                "kind": "val", "step": self.state.step, "loss": found.mean, "tokens": found.tokens,
                "seconds": self.state.seconds,
            })  # fmt: skip
        return found

    def _write_result(self, losses: evaluate.Losses, weights: dict[str, Tensor], peak: int | None) -> dict[str, Any]:
        config, state = self.config, self.state
        evaluate.write_positions(self.folder / "positions.csv", losses)
        vocabulary = self.store.folder / FILE
        if vocabulary.is_file():
            shutil.copyfile(vocabulary, self.folder / FILE)
        trained = self.log.of_kind("train")
        metrics = {
            "val_loss": losses.mean,
            "val_tokens": losses.tokens,
            "steps": state.step,
            "tokens": state.step * config.batch * config.context,
            "seconds": state.seconds,
            "startup_seconds": state.startup_seconds,
            "first_loss": trained[0]["loss"] if trained else None,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "flops_a_token": self.flops_a_token,
            "mfu": trained[-1].get("mfu") if trained else None,
            "initial": self.before,
            "processes": self.ranks.count,
            "peak_memory": peak,
            "device": device_name(self.device),
            "versions": versions(),
            "config": as_dict(config),
        }
        tensor_files.write(
            self.folder / "model.safetensors",
            weights,
            {
                "kind": KIND,
                "config": as_dict(config),
                "steps": state.step,
                "seconds": state.seconds,
                "initial": self.before,
            },
        )
        write_json(self.folder / "metrics.json", metrics)
        return metrics


def _vocabulary(folder: Path) -> bytes | None:
    path = folder / FILE
    return path.read_bytes() if path.is_file() else None


class Saved(NamedTuple):
    config: Config
    data: Path
    hash: str


def saved_run(folder: Path) -> Saved:
    return settings_as(
        folder / SETTINGS,
        lambda saved: Saved(Config(**saved["config"]), Path(saved["data"]["folder"]), saved["data"]["hash"]),
    )
