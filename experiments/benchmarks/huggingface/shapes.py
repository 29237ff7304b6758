"""Models by their configs: widths and heads of published ones, fewer layers, a small vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 8192  # the last layer of a published one, 30,522 to 256,000, would take more time than attention

# For a trial on a CPU. With weights of 0.02, the default, attention would be almost uniform.
_TINY = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A model of random weights, and the size of its inputs.

    model, config: classes of Transformers. small: changes for a trial. checked: changes for the comparison with
    "eager". positions: the setting that must be a sequence's length. without: implementations that break later runs,
    with the reason. tokens: per row, 0 for images. batch: rows of a step.
    """

    name: str
    model: str
    config: str
    settings: Mapping[str, Any]
    small: Mapping[str, Any]
    tokens: int
    batch: int
    checked: Mapping[str, Any] = field(default_factory=dict)
    positions: str = ""
    without: Mapping[str, str] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        return "tokens/s" if self.tokens else "images/s"

    def made(self, dtype: torch.dtype, device: torch.device, *, tokens: int, small: bool, check: bool) -> nn.Module:
        import transformers

        values = {**self.settings, **(self.small if small else {}), **(self.checked if check else {})}
        if self.positions:
            values[self.positions] = tokens
        config = getattr(transformers, self.config)(**values, pad_token_id=0)
        torch.manual_seed(0)
        # The grouped product of experts has no fp64.
        experts = {"experts_implementation": "eager"} if check and "num_local_experts" in values else {}
        with device:
            made: nn.Module = getattr(transformers, self.model)._from_config(
                config, dtype=dtype, attn_implementation="eager", **experts
            )
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "sink" in name or "relative" in name:
                    parameter.normal_()
        return made.to(device).eval()

    def inputs(
        self, model: nn.Module, device: torch.device, *, tokens: int, batch: int, seed: int = 0
    ) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        config: Any = model.config
        if not self.tokens:
            weight = next(model.parameters())
            size = config.image_size
            images = torch.randn(batch, config.num_channels, size, size, generator=generator)
            labels = torch.randint(config.num_labels, (batch,), generator=generator)
            return {"pixel_values": images.to(device, weight.dtype), "labels": labels.to(device)}

        def drawn(length: int) -> Tensor:
            return torch.randint(1, config.vocab_size, (batch, length), generator=generator).to(device)

        source = drawn(tokens)
        return {"input_ids": source, "labels": drawn(max(1, tokens // 4)) if config.is_encoder_decoder else source}

    def count(self, inputs: Mapping[str, Tensor]) -> int:
        if not self.tokens:
            return len(inputs["pixel_values"])
        source, target = inputs["input_ids"], inputs["labels"]
        return source.numel() + (0 if target is source else target.numel())


_LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "use_cache": False,
}  # fmt: skip

SHAPES = (
    # 4 of the 16 layers of Llama 3.2 1B: width 2,048, 32:8 heads of 64.
    Shape(
        "llama", "LlamaForCausalLM", "LlamaConfig", _LLAMA, _TINY, 8192, 2, positions="max_position_embeddings",
    ),
    # 8 of the 24 layers of GPT-2 medium: width 1,024, 16 heads of 64; as many positions as tokens.
    Shape(
        "gpt2", "GPT2LMHeadModel", "GPT2Config",
        {
            "vocab_size": VOCABULARY, "n_embd": 1024, "n_layer": 8, "n_head": 16, "use_cache": False,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
        {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.2},
        16_384, 1, positions="n_positions",
    ),
    # T5 v1.1 small: 8 + 8 layers of width 512, 6 heads of 64, a learned bias by distance; a quarter as many target
    # tokens as source tokens.
    Shape(
        "t5", "T5ForConditionalGeneration", "T5Config",
        {
            "vocab_size": VOCABULARY, "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_heads": 6,
            "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0,
        },
        {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        2048, 8, without={"flex_attention": "PyTorch 2.11 writes the gradient of its learned bias to other memory"},
    ),
    # Swin tiny: images of 224 pixels, windows of 7 x 7 patches, a learned bias by distance.
    Shape(
        "swin", "SwinForImageClassification", "SwinConfig",
        {
            "image_size": 224, "patch_size": 4, "embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24],
            "window_size": 7, "drop_path_rate": 0.0, "num_labels": 1000,
        },
        {
            "image_size": 32, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
            "num_labels": 10, "initializer_range": 0.2,
        },
        0, 64,
    ),
    # 4 of the 26 layers of Gemma 2 2B: width 2,304, 8:4 heads of 256, a soft cap, a window of 4,096 in every other
    # layer.
    Shape(
        "gemma2", "Gemma2ForCausalLM", "Gemma2Config",
        {
            "vocab_size": VOCABULARY, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 4,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
            "use_cache": False,
        },
        {**_TINY, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}, 8192, 1, {"sliding_window": 32},
        "max_position_embeddings",
    ),
    # 4 of the 24 layers of gpt-oss 20B: width 2,880, 64:8 heads of 64, sinks, a window of 128 in every other layer; 2
    # of its 32 experts, both used by every token.
    Shape(
        "gpt-oss", "GptOssForCausalLM", "GptOssConfig",
        {
            "vocab_size": VOCABULARY, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 4,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
            "num_local_experts": 2, "num_experts_per_tok": 2, "use_cache": False,
        },
        _TINY, 8192, 1, {"sliding_window": 32}, "max_position_embeddings",
    ),
    # BERT base: 12 layers of width 768, 12 heads of 64, every token sees every other.
    Shape(
        "bert", "BertForMaskedLM", "BertConfig",
        {
            "vocab_size": VOCABULARY, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
            "num_attention_heads": 12, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        },
        {name: value for name, value in _TINY.items() if name not in ("num_key_value_heads", "head_dim")}, 512, 32,
        positions="max_position_embeddings",
    ),
)  # fmt: skip


GENERATED = Shape(
    "llama", "LlamaForCausalLM", "LlamaConfig",
    {
        "vocab_size": VOCABULARY, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "bos_token_id": None,
        "eos_token_id": None,
    },
    _TINY, 1, 1, positions="max_position_embeddings",
)  # fmt: skip
