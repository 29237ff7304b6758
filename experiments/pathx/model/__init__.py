"""The classifier of images as tokens, and a U-Net."""
