from __future__ import annotations

from typing import Any

Settings = dict[str, Any]


def _epochs(count: int, examples: int, batch: int) -> Settings:
    """`count` passes over the training examples; the first is the warm-up."""
    return {"batch": batch, "steps": count * (examples // batch), "warmup": examples // batch}


def _validated(every: int, examples: int) -> Settings:
    return {"eval_every": every, "eval_examples": examples}


# The sizes and schedules of the Long Range Arena's transformer (lra_benchmarks/*/configs), in bf16. Its learning rate
# of 0.05 / sqrt(step) peaks at the end of the warm-up.
_ARENA: Settings = {"attention_dropout": 0.1, "pool": "cls", "positions": "sinusoidal", "precision": "bf16"}
_RSQRT: Settings = {"batch": 32, "schedule": "rsqrt", "weight_decay": 0.1, "clip": 0.0}
_PIXELS: Settings = {"schedule": "cosine", "weight_decay": 0.0, "clip": 0.0, "lr": 1e-3}
_ARENA_TASKS: dict[str, Settings] = {
    "listops": {**_RSQRT, "depth": 4, "width": 512, "heads": 8, "mlp": 1024, "steps": 5000, "lr": 0.05 / 1000**0.5,
                "warmup": 1000},
    "text": {**_RSQRT, "depth": 4, "width": 256, "heads": 4, "mlp": 1024, "steps": 20000, "lr": 0.05 / 8000**0.5,
             "warmup": 8000},
    "retrieval": {**_RSQRT, "depth": 4, "width": 128, "heads": 4, "mlp": 512, "steps": 5000, "lr": 0.05 / 8000**0.5,
                  "warmup": 8000},
    "image": {**_PIXELS, **_epochs(200, 45000, 256), "depth": 1, "width": 128, "heads": 8, "head_dim": 8, "mlp": 128,
              "dropout": 0.3, "attention_dropout": 0.2, "lr": 5e-4, "positions": "learned"},
    "pathfinder32": {**_PIXELS, **_epochs(200, 160000, 512), "depth": 4, "width": 32, "heads": 4, "head_dim": 4,
                     "mlp": 32, "dropout": 0.2, "pool": "mean"},
    "pathfinder64": {**_PIXELS, **_epochs(200, 160000, 256), "depth": 2, "width": 32, "heads": 4, "mlp": 32},
    "pathfinder128": {**_PIXELS, **_epochs(200, 160000, 64), "depth": 1, "width": 32, "heads": 2, "head_dim": 8,
                      "mlp": 32, "clip": 1.0, "pool": "mean", "positions": "learned"},
    "pathfinder256": {**_PIXELS, **_epochs(100, 160000, 32), "depth": 2, "width": 32, "heads": 4, "mlp": 32},
}  # fmt: skip

# The FlashAttention authors' Pathfinder (HazyResearch/fly).
_FLASH: Settings = {
    "depth": 2, "width": 64, "heads": 2, "mlp": 128, "dropout": 0.2, "attention_dropout": 0.2, "pool": "mean",
    "lr": 1e-3, "schedule": "cosine", "weight_decay": 0.0, "precision": "bf16", **_epochs(200, 160000, 512),
}  # fmt: skip

# The Nystromformer authors' transformer (mlpen/Nystromformer, LRA/code/lra_config.py), whose settings the
# FlashAttention paper also used: one small model for all tasks, in bf16, trained on as many examples, and tested with
# the weights of its best validation (run_tasks.py). The original treats black pixels of Pathfinder as padding.
_NYSTROMFORMER: Settings = {
    "depth": 2, "width": 64, "heads": 2, "mlp": 128, "dropout": 0.1, "attention_dropout": 0.1, "pool": "mean",
    "positions": "learned", "lr": 1e-4, "schedule": "linear", "weight_decay": 0.0, "clip": 0.0, "precision": "bf16",
    "keep": "best",
}  # fmt: skip
_NYSTROMFORMER_TASKS: dict[str, Settings] = {
    "listops": {"batch": 32, "steps": 5000, "warmup": 1000, **_validated(50, 2000)},
    # Validation is the test split. The authors choose weights by it; this preset does not.
    "text": {"batch": 32, "steps": 20000, "warmup": 8000, "max_tokens": 4000, **_validated(500, 25000), "keep": "last"},
    "retrieval": {"batch": 32, "steps": 30000, "warmup": 800, **_validated(300, 18090)},
    "image": {"batch": 256, "steps": 35000, "warmup": 175, **_validated(175, 5000)},
    "pathfinder32": {"batch": 256, "steps": 62400, "warmup": 312, "background": "drop", **_validated(312, 20000)},
}

# For one GPU: at most 4.8 million parameters.
_MODERN: Settings = {
    "depth": 6, "width": 256, "heads": 4, "mlp": 512, "steps": 20000, "batch": 64, "lr": 1e-3, "warmup": 1000,
    "weight_decay": 0.05, "precision": "bf16",
}  # fmt: skip
_PATHS: Settings = {
    "width": 128, "heads": 4, "mlp": 256, "dropout": 0.0, "pool": "mean+max", "positions": "rotary2d", "qk_norm": True,
    "background": "drop", "weight_decay": 0.0, "average": 0.999,
}  # fmt: skip
_MODERN_TASKS: dict[str, Settings] = {
    # The number of open brackets identifies the root's arguments: models with other positions and [CLS] learned no more
    # than the root operator gives. Dropout delays learning, and a model trained with dropout is then less accurate
    # without it, because dropout changes the maximum over 2,000 tokens that the pooling takes.
    "listops": {"positions": "nested", "pool": "mean+max", "qk_norm": True, "dropout": 0.0},
    "text": {"batch": 32, "dropout": 0.2, "attention_dropout": 0.1},
    "retrieval": {"batch": 16},
    "books-matching": {"batch": 16},
    "image": {"batch": 64, "dropout": 0.2, "pool": "mean", "augment": "mirror"},
    "pathfinder32": {**_PATHS, "batch": 128, "steps": 50000},
    "pathfinder64": {**_PATHS, "batch": 64, "steps": 50000, "max_tokens": 2048},
    "pathfinder128": {**_PATHS, "batch": 32, "steps": 100000, "max_tokens": 6144},
    "pathfinder256": {**_PATHS, "batch": 16, "steps": 100000, "max_tokens": 10240},
}

# Models of these sizes by the arena's own rules: its inputs, splits and lengths, and no help but relative positions.
# The number of parameters does not depend on the mask. Runs end by the minutes or the steps that their command names.
_RULES: Settings = {
    **_MODERN, "positions": "rotary", "pool": "mean", "qk_norm": True, "dropout": 0.1, "warmup": 200,
    "steps": 1_000_000, "compiled": True, **_validated(2000, 2000),
}  # fmt: skip
_SQUARE: Settings = {**_RULES, "positions": "rotary2d", "block": 64, "window": 256}
_RULES_TASKS: dict[str, Settings] = {
    "listops": {**_RULES, "pool": "mean+max", "dropout": 0.0},
    "text": {**_RULES, "batch": 32},
    "retrieval": {**_RULES, "batch": 16},
    "books-matching": {**_RULES, "batch": 16},
    "image": {**_SQUARE, "batch": 64},
    "pathfinder32": {**_SQUARE, "width": 128, "mlp": 256, "heads": 2, "batch": 128},
    "pathfinder128": {**_SQUARE, "width": 128, "mlp": 256, "heads": 2, "batch": 16, "block": 128, "window": 1024},
}

# The highest accuracy within a few minutes of one GPU. The table lists the extra help.
_BEST: Settings = {**_RULES, "convolution": 7, "average": 0.998, "warmup": 500}
_BEST_SQUARE: Settings = {**_BEST, "positions": "rotary2d", "convolution": 3, "block": 64, "window": 256}
_BEST_PATHS: Settings = {
    **_BEST_SQUARE, "width": 128, "mlp": 256, "heads": 2, "depth": 8, "dropout": 0.0, "weight_decay": 0.01,
    "pool": "mean+max", "auxiliary": 0.5, "augment": "square",
}  # fmt: skip
_BEST_TASKS: dict[str, Settings] = {
    # The answer is the value of the first operator. With counted brackets alone operators did not find their arguments:
    # 98 % of the sums of digits were right, but 22 % of the sums with nested expressions.
    "listops": {
        **_BEST, "positions": "tree", "pool": "first", "auxiliary": 3.0, "dropout": 0.0, "depth": 12, "width": 192,
        "heads": 3, "mlp": 384, "weight_decay": 0.01, "lr": 1e-3,
    },
    "text": {**_BEST, "batch": 32, "dropout": 0.25, "pool": "mean+max", "lr": 7e-4},
    "retrieval": {**_BEST, "batch": 16},
    "books-matching": {**_BEST, "batch": 16},
    "image": {**_BEST_SQUARE, "batch": 128, "augment": "crops", "label_smoothing": 0.1, "lr": 1.5e-3,
              "cutmix": 0.5, "encoding": "brightness"},
    "pathfinder32": {**_BEST_PATHS, "batch": 128},
}  # fmt: skip

# Short expressions, a small model, and a head that reads the first token, the root operator: half a minute on two CPU
# cores is enough to learn the operator's typical answers. [CLS] would first have to find the operator.
_DEMO: Settings = {
    "block": 64, "window": 128, "depth": 2, "width": 64, "heads": 2, "mlp": 128, "dropout": 0.0, "pool": "first",
    "steps": 120, "minutes": 0.4, "batch": 8, "max_tokens": 1024, "lr": 2e-3, "warmup": 20, "device": "cpu",
    "eval_every": 1000, "checkpoint_every": 1000, "log_every": 5, "longer_than": 300, "shorter_than": 1024,
    "train_examples": 2000, "val_examples": 200, "test_examples": 300,
}  # fmt: skip

PRESETS: dict[str, dict[str, Settings]] = {
    "lra": {task: {**_ARENA, **settings} for task, settings in _ARENA_TASKS.items()},
    "flash": {"pathfinder32": _FLASH, "pathfinder64": _FLASH, "pathfinder128": _FLASH, "pathfinder256": _FLASH},
    "nystromformer": {task: {**_NYSTROMFORMER, **settings} for task, settings in _NYSTROMFORMER_TASKS.items()},
    "modern": {task: {**_MODERN, **settings} for task, settings in _MODERN_TASKS.items()},
    "rules": _RULES_TASKS,
    "best": _BEST_TASKS,
    "demo": {"listops": _DEMO},
}


def settings_of(preset: str, task: str) -> Settings:
    if preset not in PRESETS:
        raise ValueError(f"the preset must be one of {', '.join(PRESETS)}; got {preset!r}")
    if task not in PRESETS[preset]:
        raise ValueError(f"the preset {preset} is for {', '.join(PRESETS[preset])}; got the task {task!r}")
    return PRESETS[preset][task]
