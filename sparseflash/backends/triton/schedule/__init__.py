"""From a mask to work: the tiles of each program, how long rows are split, and the order in which programs start.

It may import `blockmask` and the tile sizes in `configs`; it knows no kernels and launches nothing.
"""
