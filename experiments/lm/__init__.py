"""Language models with block-sparse attention: GPT-2's shape, real text, 1K to 64K tokens of context.

    python -m experiments.lm corpus --out data/text
    python -m experiments.lm train --data data/text --preset cpu

May import the library, its command line's `pattern_text` (patterns from text), `training` and `measurements`. No other
folder imports it. This file imports nothing.
"""
