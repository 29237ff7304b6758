"""Plans the work of a mask: the tiles of each program, the chunks of long rows, and the order in which programs start.

It does not depend on the attention kernels. Its own kernels, in `fused`, plan masks that are made at every step.
"""
