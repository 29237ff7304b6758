"""Masks of images as tokens: relations of pixels, token orders, lists of live tiles.

May import the library, with its packing of bits (`blockmask.bitmask`), and nothing of experiments. For all of pathx.
"""
