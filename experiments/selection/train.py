from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from experiments.selection.model import RecallModel
from experiments.selection.recall import Recall
from experiments.selection.sizes import Sizes
from experiments.training.clock import Clock

_TEST_SEED = 1 << 40


@dataclass(frozen=True)
class Settings:
    task: Recall
    sizes: Sizes
    steps: int
    batch: int
    lr: float = 3e-3
    measure_every: int = 50
    test_batches: int = 4
    alike: bool = False
    marked: bool = True

    def changed(self, *, block: int | None = None, marked: bool = True, steps: int | None = None) -> Settings:
        """Blocks of another size, as many keys a query; queries without their common mark; another number of steps."""
        sizes = self.sizes
        if block is not None:
            if sizes.chosen * sizes.block % block:
                raise ValueError(f"block must divide the {sizes.chosen * sizes.block} keys of a query; got {block}.")
            sizes = replace(sizes, block=block, chosen=sizes.chosen * sizes.block // block)
        return replace(self, sizes=sizes, marked=marked, steps=self.steps if steps is None else steps)


PRESETS = {
    "test": Settings(Recall(128, 32, 128), Sizes(128, width=32, dim=16, tile=16, chosen=2), 2, 2, 3e-3, 1, 1),
    "cpu": Settings(Recall(), Sizes(256, width=64, heads=2, kv_heads=1), 400, 16),
    "gpu": Settings(
        Recall(16384, 1024, 16384, block=64), Sizes(16384, block=64, tile=64, chosen=16), 1000, 8, alike=True
    ),
}


def train(
    way: str,
    settings: Settings,
    device: torch.device,
    seed: int = 0,
    report: Callable[[dict[str, Any]], None] = lambda measured: None,
) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = RecallModel(settings.task, settings.sizes, way, alike=settings.alike, marked=settings.marked).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
    generator = torch.Generator(device).manual_seed(seed)
    curve, clock, measuring = [], Clock(device), 0.0
    warmup = max(1, settings.steps // 20)
    for step in range(1, settings.steps + 1):
        remaining = (settings.steps - step + 1) / settings.steps
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(step / warmup, remaining)
        batch = settings.task.batch(settings.batch, generator)
        logits, _ = model(batch)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.answers.flatten())
        own = getattr(model.attention, "loss", None)
        (loss if own is None else loss + own).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % settings.measure_every == 0 or step == settings.steps:
            before = clock.finish()
            curve.append({"step": step, "loss": loss.item(), **measure(model, settings, seed)})
            report(curve[-1])
            measuring += clock.finish() - before
    seconds = clock.finish() - measuring
    tokens = settings.steps * settings.batch * settings.task.tokens
    return {
        "way": way,
        **curve[-1],
        "tokens_per_second": tokens / seconds,
        "curve": curve,
        "settings": asdict(settings),
    }


@torch.no_grad()
def measure(model: RecallModel, settings: Settings, seed: int) -> dict[str, float]:
    """On new sequences: right answers, and (query, head) pairs that read the block with the answer."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(_TEST_SEED + seed)
    model.eval()
    right, found, any_head = [], [], []
    for _ in range(settings.test_batches):
        batch = settings.task.batch(settings.batch, generator)
        logits, mask = model(batch)
        right.append((logits.argmax(-1) == batch.answers).float().mean())
        read = model.found(mask, batch)
        found.append(read.float().mean())
        any_head.append(read.any(1).float().mean())
    model.train()
    names = ("accuracy", "found", "found_by_any_head")
    return {name: torch.stack(x).mean().item() for name, x in zip(names, (right, found, any_head), strict=True)}
