"""How kernels of every family are launched: arguments by name, examples of tensors, merges, and sums of gradients."""
