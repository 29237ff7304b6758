"""From a mask to work: the tiles of each program, how long rows are split, and the order in which programs start.

It may import `blockmask`, `backends.problem`, and of the Triton backend `alignment`, `configs`, `overrides` and
`cuda_graphs`. It knows no kernels and launches nothing.
"""
