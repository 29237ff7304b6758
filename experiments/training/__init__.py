"""What every trainer uses: the training loop, checkpoints, resuming, logs, processes, settings, shared layers.

May import the library, and no other folder of experiments; all of them may import it. This file imports nothing, so
that worker processes start without PyTorch.
"""
