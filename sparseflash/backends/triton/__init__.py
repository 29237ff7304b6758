"""The Triton backend: `api.py` is its entry point, `dispatch.py` chooses the kernels, `schedule/` plans the work, and
`portable/` has the kernels.

May import `blockmask`, `backends.problem` and `backends.registration`. Importing `api` needs Triton; `attention.py`
imports it only when it is called. Outside this folder only `launcher` may be imported; `masks/fused` launches its
kernels with it, too.
"""
