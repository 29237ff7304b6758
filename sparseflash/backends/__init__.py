"""The backends that compute attention, one file or folder each. `registration.py` makes each a PyTorch operator.

They may import `blockmask` and `dropout`, but not one another. `attention.py` imports them all.
"""
