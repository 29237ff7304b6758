"""From a mask to work: the tiles of each program, how long rows are split, and the order in which programs start.

It may import `blockmask`, `limits`, `backends.problem`, and of the Triton backend `alignment`, `cuda_graphs`, `device`,
`launcher` and `overrides`. It knows no kernels but its own, in `fused`, which make the plans of masks that are made at
every step.
"""
