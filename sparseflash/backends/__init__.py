"""The backends that compute attention, one file or folder each.

`registration.py` makes each backend a PyTorch operator; `scored.py` adds an operator that takes score modifications.
Backends do not import one another, except `cached` (few queries against a KV cache), which computes by the definition
in `reference`.
"""
