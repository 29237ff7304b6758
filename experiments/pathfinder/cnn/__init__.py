"""A small 2-D convolutional network on Pathfinder images: the accuracy of a plain image model without attention.

python -m experiments.pathfinder cnn --size 32 --contour 14
"""
