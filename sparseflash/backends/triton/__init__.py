"""The Triton backend: `api.py` is its entry point, `schedule/` plans the work, `portable/` has the kernels.

It may import `blockmask` and `backends.registration`. Importing `api` needs Triton; nothing else in the library does.
"""
