import torch

from experiments.lra.config import Config
from experiments.lra.data.listops.generator import Settings
from experiments.training.trainer import Trainer

DATA = Settings(10, 60, train=64, val=16, test=24)
TINY = Config(
    mask="butterfly", block=16, window=16, depth=2, width=32, heads=2, mlp=32, dropout=0.1, attention_dropout=0.2,
    average=0.9, batch=8, max_tokens=40,
    lr=3e-3, warmup=2, steps=11, eval_every=4, checkpoint_every=3, log_every=2, device="cpu",
)  # fmt: skip
TINY_IMAGES = Config(
    task="pathfinder32", auxiliary=0.5, positions="rotary2d", pool="mean", background="drop", mask="dense", block=64,
    depth=1, width=16, heads=1, mlp=16, dropout=0.0, steps=4, batch=4, warmup=1, eval_every=2, checkpoint_every=3,
    log_every=2, device="cpu",
)  # fmt: skip


def weights(run: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


def same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
