"""Models without attention, as baselines: linear ones on bags of tokens, and a small convolutional network."""
