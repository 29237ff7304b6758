"""The score modifications in the kernels, one file per kind: device functions, their arguments, sums of gradients.

`kind.py` defines the interface of a kind, and `kinds.py` lists the kinds; `scores/` defines their results. This package
may import `scores`, `blockmask.cache` and `limits`, and from the Triton backend `alignment`, `availability`,
`device_functions`, `launch` and `schedule`, and for types `portable.learned`.
"""
