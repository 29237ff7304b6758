"""The score modifications in the kernels, one file per kind: device functions, their arguments, sums of gradients.

`kind.py` defines the interface of a kind with the portable kernels, `hopper.py` with the Hopper forward, and `kinds.py`
lists the kinds; `scores/` defines their results. This package may import `scores`, `blockmask.cache` and `limits`, and
from the Triton backend `alignment`, `availability`, `device_functions`, `hopper.configs`, `hopper.gluon_api`,
`hopper.record`, `hopper.scores`, `launch` and `schedule`, and for types `portable.learned`.
"""
