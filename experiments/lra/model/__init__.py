"""An encoder with any mask, the classifier, and masks by name."""
