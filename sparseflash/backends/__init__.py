"""The backends that compute attention, one file or folder each. `registration.py` makes each a PyTorch operator,
`scored.py` one with changed scores.

They may import `blockmask`, `scores` and `dropout`, but not one another; `cached`, for few queries and a cache of keys,
computes by the definition in `reference`. `attention.py` and `decode.py` import them.
"""
