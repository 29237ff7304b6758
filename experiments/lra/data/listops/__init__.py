"""ListOps: its grammar, the generator of data, and the tokens that a model reads.

May import `training` alone, and PyTorch nowhere. For all of lra.
"""
