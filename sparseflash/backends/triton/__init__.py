"""The Triton backend. `api.py` is its entry point and `dispatch.py` chooses the kernels; `schedule/` plans the work,
`portable/` has the kernels, `hopper/` faster ones for compute capability 9.0, and `decode/` those for few queries and
long caches. `versions.py` lists the versions of Triton that they were measured with, and `gate.py` checks others.

It may import `blockmask`, `dropout`, `limits`, `performance`, `scores`, and `direct`, `problem`, `registration`,
`saved` and `scored` of the backends. Importing `api` needs Triton; `attention.py` does so when it is called. Others may
import only `launcher`, which also starts the kernels of `masks/fused`.
"""
