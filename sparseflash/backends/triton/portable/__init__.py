"""The kernels in plain Triton, for every GPU since Ampere and for Triton's interpreter.

Kernel files import one another's steps, and nothing else of the library but the launcher.
"""
