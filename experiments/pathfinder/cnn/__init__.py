"""A small 2-D convolutional network on Pathfinder images: the accuracy of a plain image model without attention.

    python -m experiments.pathfinder cnn --size 32 --contour 14

It is trained separately for each kind of images, like the rules of shortcuts.py.
"""
