"""What the compiler makes of the kernels, for any architecture, without a GPU."""
