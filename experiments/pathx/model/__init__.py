"""The classifier of images as tokens, and the gathers between the orders of tokens that its layers have.

May import `training.layers`, `sparseflash.nn`, and of pathx `data` for the batches that the classifier reads, and
`masks`. For all of pathx.
"""
