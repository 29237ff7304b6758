from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from experiments.lm import patterns
from experiments.lm.config import Config
from experiments.lm.data.tokenizer import Tokenizer, load
from experiments.lm.model.attention import attention_over
from experiments.lm.model.transformer import LanguageModel
from experiments.lm.train import KIND
from experiments.training import tensor_files
from experiments.training.reading import reading


def opened(path: Path, device: torch.device) -> tuple[LanguageModel, Config, Tokenizer]:
    tensors, about = tensor_files.read(path, KIND, "config")
    with reading(path, f"a file of an {KIND} with its settings"):
        config = Config(**about["config"])
    tensor_files.check_length(path, config.context, config.block)
    if config.depth > len(tensors):
        raise ValueError(f"{path} must have tensors for its {config.depth} layers; got {len(tensors)}")
    with reading(path, "a model whose masks its own settings describe"):
        masks = patterns.of_layers(
            config.pattern, config.depth, config.sizes.heads, config.context, window=config.window, block=config.block
        )
        made = {id(mask): attention_over(mask.to(device), "sparseflash") for mask in masks}
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32

    def of_sizes() -> LanguageModel:
        return LanguageModel(config.sizes, [made[id(mask)] for mask in masks], dtype=dtype)

    model = tensor_files.filled(path, tensors, of_sizes, config.depth)
    return model.to(device).eval(), config, load(tensor_files.folder_of(path))


def chosen(scores: Tensor, temperature: float, top: int, generator: torch.Generator) -> int:
    """Scores [V], fp32 on the CPU. temperature 0: the best. top: of this many best; 0: of all.

    >>> chosen(torch.tensor([0.0, 2.0, 1.0]), 0.0, 0, torch.Generator())
    1
    """
    if temperature == 0:
        return int(scores.argmax())
    if 0 < top < len(scores):
        scores = scores.masked_fill(scores < scores.topk(top).values[-1], -torch.inf)
    return int(torch.multinomial((scores / temperature).softmax(-1), 1, generator=generator))


def continued(
    model: LanguageModel, tokens: list[int], count: int, *, context: int, temperature: float, top: int, seed: int
) -> list[int]:
    """Each token is computed from the last `context` tokens again, at the beginning of the mask."""
    generator = torch.Generator().manual_seed(seed)
    device = model.embedding.weight.device
    end = model.sizes.vocabulary - 1
    added: list[int] = []
    for _ in range(count):
        row = (tokens + added)[-context:]
        ids = torch.zeros(1, context, dtype=torch.int64, device=device)
        ids[0, : len(row)] = torch.tensor(row)
        token = chosen(model.scores(ids, len(row) - 1)[0].cpu(), temperature, top, generator)
        if token == end:
            break
        added.append(token)
    return added
