import numpy as np
import torch

from experiments.lra.config import Config
from experiments.lra.data.batches import Batch
from experiments.lra.data.examples import Examples
from experiments.lra.losses import objective_of
from experiments.lra.model.build import build_model
from experiments.lra.model.classifier import Classifier
from experiments.lra.tasks import TASKS
from experiments.training import steps
from sparseflash import BlockMask

SMALL = Config(block=16, depth=2, width=32, heads=2, mlp=32, dropout=0.0, lr=3e-3, clip=1.0)
CPU = torch.device("cpu")


def model_with(mask: BlockMask, **changes) -> Classifier:
    config = Config(**{**vars(SMALL), **changes})
    return build_model(config, TASKS[config.task], mask)


def fake_batch(rows: int = 6, length: int = 48, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 16, (rows, length), generator=generator)
    lengths = torch.randint(length // 3, length, (rows,), generator=generator, dtype=torch.int32)
    ids[torch.arange(length) >= lengths[:, None]] = 0
    return Batch(ids, lengths, None, torch.arange(rows) % 10, int(lengths.sum()))


def examples(lengths) -> Examples:
    ids = np.concatenate([np.full(length, 1 + index % 15, np.uint8) for index, length in enumerate(lengths)])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    labels = (np.arange(len(lengths)) % 10).astype(np.uint8)
    return Examples(ids, starts[:-1, None], starts[1:, None], labels, shift=0)


def training_step(model, optimizer, batch: Batch, config: Config, lr: float) -> steps.Outcome:
    return steps.Steps(model, optimizer, objective_of(config, CPU), CPU)(batch, lr)
