"""Device functions that kernels of several families use, and the kernels that merge partial results.

This package may import `blockmask.cache`, and from the Triton backend `availability`, `changes`, `device`,
`launcher` and `schedule`. It depends on no family.
"""
