from pathlib import Path

import torch

from experiments.lm import patterns
from experiments.lm.config import Config, configure
from experiments.lm.data.files import find
from experiments.lm.data.store import make
from experiments.lm.model.attention import attention_over
from experiments.lm.model.transformer import LanguageModel, Sizes

TINY = {
    "depth": 2, "width": 64, "head_dim": 32, "context": 64, "block": 16, "window": 32, "vocabulary": 257,
    "batch_tokens": 256, "micro_tokens": 128, "steps": 6, "minutes": None, "validation_tokens": 256,
    "validate_every": 3, "log_every": 2, "warmup": 2, "device": "cpu",
}  # fmt: skip


def tiny(**changes) -> Config:
    return configure("cpu", {**TINY, **changes})


def texts(folder: Path, count: int = 60) -> Path:
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"{number:03}.txt").write_text(f"Text {number}: " + f"{number} and é {number * 7} " * (20 + number))
    return folder


def tokens(folder: Path, vocabulary: int = 257, share: float = 0.2):
    return make(find([texts(folder / "texts")]), folder / "tokens", vocabulary, lambda text: None, share)


def model_of(
    pattern, implementation, *, length=64, depth=2, dtype=torch.float32, positions="rotary", window=32, kv_heads=None,
    **more,
):  # fmt: skip
    sizes = Sizes(depth, 64, 32, 300, length, positions, kv_heads)
    layers = patterns.of_layers(pattern, depth, sizes.heads, length, window=window, block=16)
    torch.manual_seed(0)
    made = [attention_over(mask, implementation) for mask in layers]
    return LanguageModel(sizes, made, dtype=dtype, **more)


def gradients(model, ids):
    loss = model(ids[:, :-1], ids[:, 1:])
    model.zero_grad()
    loss.backward()
    return loss.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
