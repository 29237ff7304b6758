"""The kernels in plain Triton, for every GPU since Ampere and for Triton's interpreter.

Only `dispatch.py` and `api.py` import it.
"""
