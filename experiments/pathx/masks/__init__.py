"""Masks of images as tokens: relations of pixels, token orders, lists of live tiles.

May import only the library, including its packing of bits (`blockmask.bitmask`) and its command line's `pattern_text`
and `expression` (rules from a file).
"""
