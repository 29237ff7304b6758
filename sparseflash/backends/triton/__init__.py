"""The Triton backend.

`api.py` is the entry point. `prepared_call.py` holds the kernels of a call, prepared once for a mask and a layout, and
`dispatch.py` chooses them. `architecture.py` has everything that depends on a GPU's generation. `schedule/` plans the
work. `portable/` has the kernels for every GPU since Ampere, `hopper/` faster kernels for compute capability 9.0, and
`decode/` kernels for few queries and long KV caches. What several of these use is in `launch/` (how kernels are
launched), `device_functions/` and `changes/` (the device functions of the score modifications). `versions.py` lists the
versions of Triton that the kernels were measured with; `gate.py` checks the Hopper kernels under other versions.

This package may import `blockmask`, `dropout`, `limits`, `performance`, `scores`, and from the backends `direct`,
`problem`, `registration`, `saved` and `scored`. Importing `api` needs Triton; `attention.py` imports it at a call.
Other packages may import only `launcher`, which also starts the kernels of `masks/fused`.
"""
