"""The models: an encoder whose attention is any mask, the classifier that answers, and masks by their names.

For all of lra; imports experiments.training.layers and, to build a model, a run's settings.
"""
