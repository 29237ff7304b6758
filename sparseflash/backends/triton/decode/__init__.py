"""Split-K kernels for few queries against a long KV cache: each program takes a share of the keys, then the shares are
combined.
"""
