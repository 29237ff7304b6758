"""The backends that compute attention, one file or folder each. `registration.py` makes each a PyTorch operator.

May import `blockmask` and `dropout`; no backend imports another. `attention.py` imports them all.
"""
