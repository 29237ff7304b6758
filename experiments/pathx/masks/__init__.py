"""Masks of images as tokens: relations of pixels, token orders, lists of live tiles."""
