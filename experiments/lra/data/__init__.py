"""From files to batches: examples on disk, their order, augmentation, fingerprints; generated ListOps.

For all of lra; imports the description of a task from lra.tasks and nothing else of lra. This file imports nothing, so
that the generator's worker processes start without PyTorch.
"""
