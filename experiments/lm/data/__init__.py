"""Text: finding and dividing files, cutting them into tokens, and packing tokens into sequences.

May import `training` alone.
"""
