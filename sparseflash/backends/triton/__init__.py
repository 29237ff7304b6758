"""The Triton backend. `api.py` is its entry and `dispatch.py` chooses the kernels; `schedule/` decides which program
computes what, `portable/` has the kernels.

May import `blockmask`, `backends.problem` and `backends.registration`. Importing `api` needs Triton; `attention.py`
does so when it is called. Others may import `launcher` alone, which starts the kernels of `masks/fused`, too.
"""
