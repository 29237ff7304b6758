"""Kernels for Hopper GPUs (sm_90) in Gluon, behind the same masks as the portable ones.

May import `schedule`, of `backends/triton` `family` and `launcher`, of the `portable` kernels what merges chunks and
shares launches and the constants of `softmax`, `registration`, `saved`, `dropout`, and `bitmask`, `cache`, `streams`
and `transfer` of the masks.
"""
