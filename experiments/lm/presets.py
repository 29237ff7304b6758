"""Model sizes by name: GPT-2's and GPT-3's, a small one for novels, and one for a CPU."""

from __future__ import annotations

from typing import Any

# micro_tokens: of a forward and backward on one GPU, as many as fit in 80 GB.
PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {
        "depth": 4, "width": 192, "head_dim": 48, "context": 256, "vocabulary": 2048, "batch_tokens": 2048,
        "micro_tokens": 2048, "minutes": 2.0, "lr": 3e-3, "warmup": 20, "window": 128, "block": 64, "pattern": "dense",
        "precision": "fp32", "compiled": "none", "validate_every": 100, "validation_tokens": 32_768,
    },
    # For whole novels with a vocabulary of 8,192: 10 million parameters, which travel as 20 MB in fp16.
    "10M": {
        "depth": 6, "width": 320, "head_dim": 64, "vocabulary": 8192, "lr": 1.5e-3, "batch_tokens": 262_144,
        "micro_tokens": 131_072, "warmup": 50, "schedule": "trapezoid", "validate_every": 100,
    },
    "124M": {"depth": 12, "width": 768, "lr": 6e-4, "micro_tokens": 65_536},
    "350M": {"depth": 24, "width": 1024, "lr": 3e-4, "micro_tokens": 32_768},
    "760M": {"depth": 24, "width": 1536, "lr": 2.5e-4, "micro_tokens": 32_768},
    "1.3B": {"depth": 24, "width": 2048, "lr": 2e-4, "micro_tokens": 16_384},
}  # fmt: skip


def settings_of(name: str) -> dict[str, Any]:
    if name not in PRESETS:
        raise ValueError(f"the preset must be one of {', '.join(PRESETS)}; got {name!r}")
    return PRESETS[name]
