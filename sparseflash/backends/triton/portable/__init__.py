"""The kernels in plain Triton, for every GPU since Ampere and for Triton's interpreter.

This package may import `dropout`, `limits`, `scores`, `blockmask.cache`, `backends.registration`, `backends.saved`, and
from the Triton backend `changes`, `schedule`, `alignment`, `availability`, `configs`, `cuda_graphs`, `family`,
`launcher` and `overrides`. Only `dispatch.py`, `api.py`, `changes` and `hopper` import it; `decode` imports `softmax`.
"""
