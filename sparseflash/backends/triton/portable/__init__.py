"""The kernels in plain Triton, for every GPU since Ampere and for Triton's interpreter.

Kernels import one another's steps and nothing of the library but the launcher.
"""
