"""The score modifications in the kernels, one file per kind: device functions, their arguments, sums of gradients.

`kind.py` defines the interface of a kind with the portable kernels, `hopper.py` with the Hopper kernels, and `kinds.py`
lists the kinds; `scores/` defines their results. Where both are long, the part for Hopper has a file of its own:
`hopper_key_bias.py`, `hopper_pairs.py` and `hopper_table.py`. This package may import `scores`, `blockmask.cache`,
`blockmask.streams` and `limits`; from the Triton backend `alignment`, `availability`, `device_functions`, `launch`,
`launcher` and `schedule`; from `hopper` `configs`, `descriptors`, `gluon_api`, `record`, `rows` and `scores`; and for
types `hopper.learned` and `portable.learned`.
"""
