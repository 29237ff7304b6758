"""ListOps: grammar, data generator, and token ids of the model. May import only `training`, never PyTorch."""
