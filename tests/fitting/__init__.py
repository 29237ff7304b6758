"""Whether the portable kernels fit in the shared memory of GPUs that nobody has here: python -m tests.fitting."""
