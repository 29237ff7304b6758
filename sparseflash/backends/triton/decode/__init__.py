"""Kernels for few queries against a long cache of keys and values: keys split over the programs, then combined.

They may import `cached`, which has the problem, `limits`, `blockmask.cache`, and of the Triton backend `availability`,
`device`, `launcher` and the `softmax` of the portable kernels. Only `decode.py` of the library imports them.
"""
