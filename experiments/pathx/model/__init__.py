"""The classifier of images as tokens, gathers between token orders, and a U-Net."""
