"""Which features each call takes: the data of the matrix that docs/support.py writes and tests/test_calls.py tries.

A cell of the matrix works exactly, is refused with the text in `REFUSED`, or has no meaning (`NOTHING`).
"""

from __future__ import annotations

CALLS = {
    "attention": "`attention`",
    "varlen": "`attention_varlen`",
    "cache": "`attention_with_cache`",
    "selected": "`selected_attention`",
    "tokens": "`token_attention`",
    "layer": "`nn.SparseSelfAttention`",
    "selection": "`selection`",
    "multihead": "`nn.MultiheadAttention`",
    "sdpa": "`sdpa`",
    "transformers": "Transformers",
    "distributed": "`distributed.attention`",
}

SCORES = (
    "softcap", "temperature", "alibi", "log_decay", "relative", "key_bias", "bias", "tile_bias", "function", "sink",
)  # fmt: skip
FEATURES = {
    "gradients": "gradients",
    **{kind: f"`scores.{kind}`" for kind in SCORES},
    "dropout": "dropout",
    "lengths": "lengths of sequences",
    "mask": "a mask",
    "mask by head": "a mask for each head",
    "mask by batch": "a mask for each batch element",
    "return_lse": "`return_lse`",
    "grouped heads": "grouped heads",
    "Dv": "Dv other than D",
    "compile": "`torch.compile`",
    "export": "`torch.export`",
    "checkpoint": "checkpointing",
    "record": "CUDA graphs",
}

_SDPA = (
    "{} must not be given to sdpa: it has the arguments of PyTorch's own attention. Use attention, which has the "
    "others."
)
_SELECTED = (
    "scores of selected_attention must not be tile_bias, which has values for the tiles of a mask that stays the same. "
    "Use attention with the mask of the same blocks, masks.selected_keys(index, k_len=Nk, span=span, group=group)."
)
_OF_INDEX = (
    "mask must not be given to selected_attention: index says what is live. Use attention with the mask of the same "
    "blocks and another one, masks.selected_keys(index, k_len=Nk, span=span, group=group) & mask."
)
_TOKENS = (
    "{} must not be given to token_attention: its kernels gather tokens, and know no tiles. Use attention with the "
    "mask masks.selected_keys(index, ...)."
)
_CACHE = (
    "scores with a cache must be of temperature, softcap, alibi, log_decay, relative, key_bias and sink; got {}. Use "
    "attention with the keys of the cache and a mask; for one new token a bias is a key_bias."
)
_GRADIENTS = (
    "q, k_cache and v_cache must not require gradients: attention_with_cache has no backward. Call it under "
    "torch.no_grad(), or train with attention and a mask."
)
_MULTIHEAD = (
    "{} must not be given to MultiheadAttention: it has the arguments of PyTorch's own layer. Use SparseSelfAttention, "
    "which takes scores, or attention."
)
_SELECTION = "{} must not be given to MixtureOfBlocks: {}."
_UNCHANGED = "it has no score modifications. Use nn.SparseSelfAttention, or the functions of masks and attention"

REFUSED = {
    ("varlen", "mask by batch"): (
        "mask must not be given to attention_varlen: pass the pattern of a sequence, a function of its length or a "
        "rule for positions. For a mask of all packed tokens use attention(q.transpose(0, 1)[None], ...)."
    ),
    ("cache", "gradients"): _GRADIENTS,
    ("cache", "checkpoint"): _GRADIENTS,
    **{("cache", kind): _CACHE.format(kind) for kind in ("bias", "tile_bias", "function")},
    ("cache", "dropout"): (
        "dropout_p must not be given to attention_with_cache: it is for inference. To train, use attention with a mask."
    ),
    ("selected", "tile_bias"): _SELECTED,
    **{("selected", kind): _OF_INDEX for kind in ("mask", "mask by head", "mask by batch")},
    **{("tokens", kind): _TOKENS.format("scores") for kind in SCORES},
    ("tokens", "dropout"): _TOKENS.format("dropout_p"),
    **{("tokens", kind): _TOKENS.format("mask") for kind in ("mask", "mask by head", "mask by batch")},
    ("tokens", "lengths"): (
        "lengths must not be given to token_attention: -1 in index is no token, so list none past the length, and none "
        "for a query past it."
    ),
    ("layer", "return_lse"): (
        "return_lse must not be given to SparseSelfAttention: a layer returns features of tokens. Use attention with "
        "its projections."
    ),
    **{("selection", kind): _SELECTION.format("scores", _UNCHANGED) for kind in SCORES},
    ("selection", "dropout"): _SELECTION.format(
        "dropout_p", "it has no dropout. Use nn.SparseSelfAttention, or drop features of its output"
    ),
    **{
        ("selection", kind): _SELECTION.format(
            "mask", "it chooses its keys itself. Use nn.SparseSelfAttention with a mask"
        )
        for kind in ("mask", "mask by head", "mask by batch")
    },
    ("selection", "return_lse"): _SELECTION.format(
        "return_lse", "a layer returns features of tokens. Use attention with its projections"
    ),
    **{("multihead", kind): _MULTIHEAD.format("scores") for kind in SCORES if kind != "bias"},
    ("multihead", "return_lse"): _MULTIHEAD.format("return_lse"),
    **{("sdpa", kind): _SDPA.format("scores") for kind in SCORES if kind != "bias"},
    ("sdpa", "return_lse"): _SDPA.format("return_lse"),
    ("transformers", "export"): (
        "torch.export must see a mask made of tensors, but sparseflash builds masks outside of the graph; call "
        "model.set_attn_implementation('sdpa') before the export."
    ),
    ("distributed", "tile_bias"): (
        "scores must be without tile_bias over several ranks, whose calls have masks and tiles of their own; pass "
        "scores.bias, or a function of positions (scores.function)."
    ),
    ("distributed", "export"): (
        "distributed.attention must not be exported, because its exchanges are those of one plan and rank. Export the "
        "model with sparseflash.attention and the whole mask in its place."
    ),
}
_MODELS = "models of Transformers ask for soft caps, sinks and biases only"
NOTHING = {
    ("layer", "Dv"): "the heads of a layer have one size",
    ("selection", "Dv"): "the heads of a layer have one size",
    ("multihead", "grouped heads"): "PyTorch's layer has as many key heads as query heads",
    ("multihead", "Dv"): "the heads of a layer have one size",
    **{("transformers", kind): _MODELS for kind in SCORES if kind not in ("softcap", "sink", "bias")},
    ("transformers", "return_lse"): "models ask for out alone",
}
