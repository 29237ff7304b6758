"""From generated images to batches: packed tokens, hidden pixels, worker processes, tensors on the device.

May import the library, `training`, `pathfinder` for the images, and of pathx `config`, `masks` for live tiles and
`model.gather` for token orders.
"""
