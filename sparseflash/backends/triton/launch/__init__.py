"""How kernels of every family are launched: arguments by name, examples of tensors, merges, and sums of gradients.

This package may import `blockmask.cache`, `dropout` and `scores.change`, and from the Triton backend `device_functions`
and `launcher`. It depends on no family.
"""
