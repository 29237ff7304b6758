"""From generated images to batches: packed tokens, hidden pixels, worker processes, tensors on the device.

May import the library, `training`, `pathfinder` for the images, and of pathx its `config`, `masks` for the lists of
live tiles and `model.gather` for the orders of tokens. For all of pathx.
"""
