"""From files to batches: examples on disk, their order, augmentation; generated ListOps.

This file imports nothing, so that the generator's worker processes start without PyTorch.
"""
