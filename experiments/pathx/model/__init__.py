"""The classifier of images as tokens, and the gathers between the orders of tokens that its layers have.

For all of pathx; imports experiments.training.layers, and the batches of pathx.data that the classifier reads.
"""
