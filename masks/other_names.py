"""Other libraries' names for patterns, and the call that makes the same mask here."""

from __future__ import annotations

from difflib import get_close_matches

_CAUSAL = "masks.causal(n)"
_WINDOW = "masks.local(n, window=w, causal=True), or masks.local(n, left=l, right=r)"
_SINK = "masks.streaming(n, window=w, sink=s)"
OTHER_NAMES = {
    **dict.fromkeys(("causal_mask", "tril", "lower_triangular", "LowerTriangularMask", "CausalMask"), _CAUSAL),
    **dict.fromkeys(("sliding_window", "sliding_window_causal", "sliding_window_mask", "local_window"), _WINDOW),
    **dict.fromkeys(("generate_sliding_window", "window", "LocalMask", "swa", "local_attention"), _WINDOW),
    **dict.fromkeys(("full", "full_mask", "FullMask", "noop_mask", "dense_mask"), "masks.dense(n), or no mask at all"),
    **dict.fromkeys(("prefix", "prefix_lm_mask", "generate_prefix_lm_mask"), "masks.prefix_lm(n, prefix=p)"),
    **dict.fromkeys(("document", "document_mask", "doc_mask", "generate_doc_mask_mod"), "masks.documents(lengths)"),
    **dict.fromkeys(("block_diagonal", "BlockDiagonalMask"), "masks.documents(lengths), or masks.chunked(n, chunk=c)"),
    **dict.fromkeys(("natten", "na1d", "na2d", "na3d", "generate_natten"), "masks.neighborhood(shape, window=w)"),
    **dict.fromkeys(("attention_sink", "sink", "streaming_llm"), _SINK),
    **dict.fromkeys(
        ("dilated_sliding_window", "generate_dilated_sliding_window"), "masks.dilated(n, window=w, dilation=d)"
    ),
    **dict.fromkeys(("big_bird", "BigBirdSparsityConfig"), "masks.bigbird(n), or masks.deepspeed_bigbird(n)"),
    **dict.fromkeys(("padding", "padding_mask", "key_padding_mask"), "mask.with_lengths(lengths) on any mask"),
    **dict.fromkeys(("and_masks", "or_masks"), "a & b, or a | b, on masks"),
    **dict.fromkeys(("alibi", "softcap"), "sparseflash.scores (a score modification, not a mask)"),
    **dict.fromkeys(("random", "random_mask"), "masks.random_blocks(n, count=c)"),
    **dict.fromkeys(("block_index", "custom", "from_function", "mask_mod"), "BlockMask.from_function(rule, n)"),
}


def no_pattern(name: str, patterns: list[str]) -> AttributeError:
    """The error for a pattern that does not exist.

    >>> print(no_pattern("causal_mask", []))
    sparseflash.masks has no 'causal_mask'; use masks.causal(n).
    >>> print(no_pattern("buterfly", ["butterfly", "causal"]))
    sparseflash.masks has no 'buterfly'; did you mean butterfly?
    """
    if name in OTHER_NAMES:
        return AttributeError(f"sparseflash.masks has no {name!r}; use {OTHER_NAMES[name]}.")
    near = get_close_matches(name, patterns, n=3, cutoff=0.6)
    meant = f"; did you mean {' or '.join(near)}?" if near else f"; it has {', '.join(patterns)}."
    return AttributeError(f"sparseflash.masks has no {name!r}{meant}")
