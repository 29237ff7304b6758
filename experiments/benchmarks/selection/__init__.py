"""Choosing keys at every step: `python -m experiments.benchmarks selection COMMAND`.

- ideas      NSA, MoBA, MSA, DSA, QSA and VSA in their published shapes, choice included, beside dense attention
- blocks     the cost of choosing blocks, beside peers that are given the blocks
"""
