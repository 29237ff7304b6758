"""ListOps: its grammar, the generator of data, and the tokens that a model reads.

For lra.data and lra.tasks; imports experiments.training alone, and PyTorch nowhere.
"""
