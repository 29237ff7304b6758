"""The score modifications in the kernels, one file per kind: device functions, their arguments, sums of gradients.

`kind.py` defines the interface of a kind with the portable kernels, `hopper.py` with the Hopper kernels, and `kinds.py`
lists the kinds; `scores/` defines their results.
"""
