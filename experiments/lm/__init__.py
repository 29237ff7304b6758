"""Language models with block-sparse attention, in GPT-2's shape, on text."""
