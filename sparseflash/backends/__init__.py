"""The backends that compute attention, one file or folder each.

`operators.py` makes each backend callable, and a PyTorch operator where PyTorch must see one.
Backends do not import one another, except `cached` (few queries against a KV cache), which computes by the definition
in `reference`.
"""
