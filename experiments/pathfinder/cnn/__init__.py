"""A small 2-D convolutional network on Pathfinder images."""
