"""The model: a causal transformer, its attention by pattern and by implementation, and its loss."""
