"""Split-K kernels for few queries against a long KV cache: each program takes a share of the keys, then the shares are
combined.

This package may import `cached`, `limits`, `blockmask.cache`, `scores.change`, and from the Triton backend
`availability`, `changes.softcap`, `device`, `launcher` and `device_functions.softmax`. Only the library's `decode.py`
imports it.
"""
