"""Kernels for Hopper GPUs (sm_90) in Gluon, behind the same masks as the portable ones.

May import `schedule`, `changes`, of `backends/triton` `alignment`, `family` and `launcher`, of the `portable` kernels
what merges chunks, shares launches, splits fp32 numbers and sums gradients, and the constants of `softmax`,
`registration`, `saved`, `dropout`, `limits`, `scores.change`, and `bitmask`, `cache`, `streams` and `transfer` of the
masks.
"""
