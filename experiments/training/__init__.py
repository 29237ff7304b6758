"""Shared by all trainers: the training loop, checkpoints, resuming, logs, processes, settings, layers.

May import the library and no other folder of experiments. This file imports nothing, so that worker processes start
without PyTorch.
"""
