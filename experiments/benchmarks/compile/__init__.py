"""Compiles the kernels for any architecture, without a GPU."""
