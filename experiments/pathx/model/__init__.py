"""The classifier of images as tokens, the gathers between the orders of tokens that its layers have, and a U-Net.

May import `training.layers`, `sparseflash.nn`, the blocks of pathfinder's `cnn.network`, and of pathx `data` for
the batches that the models read, and `masks`. For all of pathx.
"""
