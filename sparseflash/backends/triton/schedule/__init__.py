"""From a mask to work: the tiles each program walks, how long rows are split, and the order in which programs start.

May import `blockmask` and the tile sizes in `configs`; knows no kernel and launches nothing.
"""
