"""Language models with block-sparse attention: GPT-2's shape, real text, 1K to 64K tokens of context.

`python -m experiments.lm corpus --out data/text`, then `python -m experiments.lm train --data data/text --preset cpu`.
"""
