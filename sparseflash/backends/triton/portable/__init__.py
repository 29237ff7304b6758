"""The kernels in plain Triton, for every GPU since Ampere and for Triton's interpreter."""
