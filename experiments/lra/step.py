"""One training step and one evaluation: what both need of a model, a batch and the settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.lra.batches import Batch
from experiments.lra.clock import Clock
from experiments.lra.config import Config
from experiments.lra.denoise import Denoiser
from experiments.lra.model import Classifier
from experiments.lra.ranks import ALONE, Ranks
from experiments.lra.tasks.task import Task
from experiments.lra.trace import Tracer, tracing_loss
from experiments.speed.timing import synchronize
from sparseflash import BlockMask


def build_model(config: Config, task: Task, mask: BlockMask) -> Classifier | Denoiser:
    """The model of a run, with weights from the run's seed, on the mask's device."""
    torch.manual_seed(config.seed)
    masks = [mask] * config.depth
    sizes: dict[str, Any] = {
        "vocabulary": task.vocabulary,
        "width": config.width,
        "heads": config.heads,
        "head_dim": config.head_dim,
        "mlp": config.mlp,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "positions": config.positions,
        "places": config.shape.places(task.longest),
        "side": task.side,
        "brackets": task.brackets,
        "qk_norm": config.qk_norm,
        "attention": config.attention,
    }
    model: Classifier | Denoiser
    if config.objective == "denoise":
        model = Denoiser(masks, first=config.shape.first, **sizes)
    else:
        sizes |= {"classes": task.classes, "towers": task.towers, "pool": config.pool}
        model = Tracer(masks, traces=task.traces, **sizes) if config.auxiliary else Classifier(masks, **sizes)
    if config.compiled:
        model.compile_layers()
    return model.to(mask.device)


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.AdamW:
    """The optimiser of a run."""
    return adamw(model, config.lr, config.weight_decay)


def adamw(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW; only the matrices decay, not norms, biases, embeddings and positions."""
    matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    chosen = set(matrices)
    others = [parameter for parameter in model.parameters() if parameter not in chosen]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=matrices[0].is_cuda)


class Outcome(NamedTuple):
    """Of one step, on the device."""

    loss: Tensor  # the batch's mean cross-entropy, nats
    right: Tensor  # number of right answers
    auxiliary: Tensor  # mean cross-entropy of the pixels' classes; 0 without that loss


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, config: Config, lr: float
) -> Outcome:
    """Change the weights by one step.

    model: the run's model, or what `Ranks.together` makes of it; then all numbers are of this process's share.
    """
    outcome = gradients(model, batch, config)
    follow_gradients(optimizer, lr)
    return outcome


def gradients(model: nn.Module, batch: Batch, config: Config) -> Outcome:
    """The part of a step that leaves every parameter its gradient."""
    model.train()
    loss, auxiliary, logits = losses(model, batch, config)
    take_gradients(model, total(loss, auxiliary, config), config.clip)
    return Outcome(loss.detach(), (logits.argmax(-1) == batch.labels).sum(), auxiliary.detach())


def losses(model: nn.Module, batch: Batch, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """The two losses of Outcome, and the logits of the answers."""
    logits, traces = outputs(model, batch, config)
    loss = F.cross_entropy(logits, batch.labels)
    if traces is None or batch.traced is None:
        return loss, torch.zeros((), device=logits.device), logits
    return loss, tracing_loss(traces, batch.traced), logits


def total(loss: Tensor, auxiliary: Tensor, config: Config) -> Tensor:
    """What is made small."""
    return loss + config.auxiliary * auxiliary if config.auxiliary else loss


class Steps:
    """Training steps whose operations the host hands to the device one by one.

    model: what is rehearsed; shared: what is trained, where it is not the same (see `Ranks.together`).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: Config,
        device: torch.device,
        shared: nn.Module | None = None,
    ) -> None:
        self.model, self.optimizer, self.config, self.device = model, optimizer, config, device
        self.shared = model if shared is None else shared
        self.preparing = 0.0  # seconds that preparing has taken

    def prepare(self, batch: Batch) -> None:
        """What steps on batches like this one need only once; nothing changes."""
        synchronize(self.device)
        clock = Clock(self.device)
        self._prepare(batch)
        self.preparing += clock.finish()

    def _prepare(self, batch: Batch) -> None:
        rehearsal(self.model, batch.to(self.device), self.config)

    def __call__(self, batch: Batch, lr: float) -> Outcome:
        """Change the weights by one step on a batch, which may lie on the host."""
        return training_step(self.shared, self.optimizer, batch.to(self.device), self.config, lr)


def rehearsal(model: nn.Module, batch: Batch, config: Config) -> None:
    """All of a step that may have to be compiled; nothing changes."""

    def loss() -> Tensor:
        answers, auxiliary, _ = losses(model, batch, config)
        return total(answers, auxiliary, config)

    rehearse(model, loss, batch.ids.device)


def rehearse(model: nn.Module, loss: Callable[[], Tensor], device: torch.device) -> None:
    """Compute a loss and its gradients for nothing: weights, gradients and random states stay as they are.

    Kernels are compiled then, and memory is found, so that the steps that follow take the time that steps take.
    """
    model.train()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.autograd.grad(loss(), list(model.parameters()), allow_unused=True)


def take_gradients(model: nn.Module, loss: Tensor, clip: float) -> None:
    """Leave the gradient of the loss with every parameter.

    clip: largest norm of all gradients together; 0 clips nothing.
    """
    model.zero_grad(set_to_none=True)
    loss.backward()
    if clip > 0:
        nn.utils.clip_grad_norm_(model.parameters(), clip)


def follow_gradients(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Change the weights by the gradients that the parameters have."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def forward(model: nn.Module, batch: Batch, config: Config) -> Tensor:
    """Logits in fp32, for each of the batch's labels."""
    return outputs(model, batch, config)[0]


def outputs(model: nn.Module, batch: Batch, config: Config) -> tuple[Tensor, Tensor | None]:
    """These and, of a model that traces and trains, those of every token's class, in fp32."""
    asked = () if batch.asked is None else (batch.asked,)
    with precision(batch.ids.device, config.precision):
        found = model(batch.ids, batch.lengths, batch.places, batch.live_tokens < batch.ids.numel(), *asked)
    logits, traces = found if isinstance(found, tuple) else (found, None)
    return logits.float(), None if traces is None else traces.float()


def precision(device: torch.device, name: str) -> torch.autocast:
    """Where matrix products run in bfloat16, if the setting `precision` is bf16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=name == "bf16")


@dataclass(frozen=True)
class Score:
    loss: float  # mean cross-entropy, nats
    accuracy: float
    examples: int  # or hidden tokens


@torch.inference_mode()
def evaluate(
    model: Classifier | Denoiser, batches: Iterable[Batch], config: Config, device: torch.device, ranks: Ranks = ALONE
) -> Score:
    """Loss and accuracy over some batches, those of all processes together."""
    model.eval()
    loss = torch.zeros((), dtype=torch.float64, device=device)
    right = torch.zeros((), dtype=torch.int64, device=device)
    examples = 0
    for batch in batches:
        batch = batch.to(device)
        logits = forward(model, batch, config)
        loss += F.cross_entropy(logits, batch.labels, reduction="sum")
        right += (logits.argmax(-1) == batch.labels).sum()
        examples += len(batch.labels)
    sums = torch.stack([loss, right.double(), torch.full_like(loss, examples)])  # exact below 2^53
    total_loss, total_right, total = ranks.summed(sums).tolist()
    return Score(total_loss / total, total_right / total, int(total))
