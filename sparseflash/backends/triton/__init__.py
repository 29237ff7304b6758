"""The Triton backend. `api.py` is its entry point and `dispatch.py` chooses the kernels; `schedule/` plans the work,
`portable/` has the kernels, `hopper/` faster kernels for compute capability 9.0, and `decode/` kernels for few queries
and long caches. `versions.py` lists the versions of Triton that the kernels were measured with; `gate.py` checks the
Hopper kernels under other versions.

It may import `blockmask`, `dropout`, `limits`, `performance`, `scores`, and `direct`, `problem`, `registration`,
`saved` and `scored` of the backends. Importing `api` needs Triton; `attention.py` does so when it is called. Others may
import only `launcher`, which also starts the kernels of `masks/fused`.
"""
