"""What computes attention: one file or folder for each backend; `registration.py` makes each an operator of PyTorch.

Its files may import `blockmask` and `dropout`, but no backend imports another. `attention.py` imports them all.
"""
