"""Shared by all trainers: the training loop, checkpoints, resuming, logs, processes, settings, layers.

This file imports nothing, so that worker processes start without PyTorch.
"""
