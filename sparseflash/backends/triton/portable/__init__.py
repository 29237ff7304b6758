"""The kernels in plain Triton, for every GPU since Ampere and for Triton's interpreter.

This package may import `dropout`, `limits`, `scores`, `blockmask.cache`, `backends.registration`, `backends.saved`, and
from the Triton backend `changes`, `device_functions`, `launch`, `schedule`, `alignment`, `architecture`,
`configs`, `family`, `launcher` and `overrides`. Only `dispatch.py` and `api.py` import it.
"""
