"""From generated images to batches: packed tokens, hidden pixels, worker processes, tensors on the device.

For all of pathx; imports experiments.pathfinder for the images, pathx.masks for the lists of live tiles.
"""
