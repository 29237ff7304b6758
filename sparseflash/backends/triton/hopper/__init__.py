"""Gluon kernels for Hopper GPUs (sm_90). They take the same masks as the portable kernels.

May import `schedule` and `changes`; of `backends/triton` `alignment`, `family` and `launcher`; of the `portable`
kernels the modules that merge chunks, share launches, split fp32 numbers and sum gradients, and the constants of
`softmax`; `registration`, `saved`, `dropout`, `limits` and `scores.change`; and `bitmask`, `cache`, `streams` and
`transfer` of the masks.
"""
