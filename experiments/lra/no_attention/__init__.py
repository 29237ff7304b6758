"""Models without attention, as baselines: linear ones on bags of tokens, and a small convolutional network.

May import `lra.data`, `lra.tasks`, `training`, `measurements`, and the network of `pathfinder.cnn`.
"""
