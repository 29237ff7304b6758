"""The model: a causal transformer, its attention by pattern and by implementation, and its loss.

May import lm, training and the library.
"""
