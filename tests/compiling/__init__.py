"""Triton's compiler for tests: Triton chooses between it and the interpreter when it is imported."""
