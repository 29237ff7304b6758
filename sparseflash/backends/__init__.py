"""What computes attention: one file or folder a backend. `registration.py` makes each an operator of PyTorch.

May import `blockmask` and `dropout`. No backend imports another.
"""
