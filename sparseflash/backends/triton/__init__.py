"""The Triton backend.

`api.py` is the entry point. `prepared_call.py` holds the kernels of a call, prepared once for a mask and a layout;
`dispatch.py` chooses them. `architecture.py` has everything that depends on a GPU's generation. `schedule/` plans the
work. `portable/` has the kernels for every GPU since Ampere, `hopper/` faster ones for compute capability 9.0,
`decode/` those for few queries and long KV caches. `versions.py` lists the versions of Triton that the kernels were
measured with; `gate.py` checks the Hopper kernels under others.

Importing `api` needs Triton; `attention.py` imports it at a call.
"""
