"""The backends that compute attention, one file or folder each. `registration.py` makes each a PyTorch operator,
`scored.py` one with changed scores.

They may import `blockmask`, `scores` and `dropout`, but not one another. `attention.py` imports them all.
"""
