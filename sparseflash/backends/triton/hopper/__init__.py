"""Gluon kernels for Hopper GPUs (sm_90). They take the same masks as the portable kernels.

May import `changes`, `device_functions`, `launch` and `schedule`; of `backends/triton` `alignment`, `architecture`,
`family` and `launcher`; `registration`, `saved`, `dropout`, `limits` and `scores.change`; and `bitmask`, `cache`,
`streams` and `transfer` of the masks.
"""
