"""The Triton backend: `api.py` is its entry, `schedule/` says who computes what when, `portable/` has the kernels.

May import `blockmask` and `backends.registration`. Importing `api` needs Triton; nothing else in the library does.
"""
