"""ListOps: grammar, data generator, and token ids of the model."""
