"""Models without attention, as baselines: linear ones on bags of tokens, and a small convolutional network.

May import the data and tasks of `lra`, `training`, and the network of `pathfinder.cnn`.
"""
