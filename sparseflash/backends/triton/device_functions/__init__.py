"""Device functions that kernels of several families use, and the kernels that merge partial results."""
