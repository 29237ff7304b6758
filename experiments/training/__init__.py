"""What every trainer uses: the training loop, checkpoints, resuming, logs, processes, settings, shared layers.

May be imported by all other folders of experiments; imports none of them. This file imports nothing, so that worker
processes start without PyTorch.
"""
