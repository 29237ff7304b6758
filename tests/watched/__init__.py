"""What a call does besides its result: waits for a GPU, kernels that are started, memory."""
