"""The classifier of images as tokens, gathers between token orders, and a U-Net.

May import `training.layers`, `sparseflash.nn`, the blocks of pathfinder's `cnn.network`, and of pathx `data` for the
batches, and `masks`.
"""
