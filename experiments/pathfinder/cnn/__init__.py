"""A small 2-D convolutional network on Pathfinder images: what the plain model for images reaches without attention.

    python -m experiments.pathfinder cnn --size 32 --contour 14

Like the rules of shortcuts.py, it is fitted to each kind of images by itself, and its accuracy stands beside the other
models' results. May import `training` and the images of `pathfinder`. Other folders import the stored results
(cnn.results) alone.
"""
