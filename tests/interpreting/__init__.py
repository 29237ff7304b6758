"""Kernels on the CPU: corrections to Triton's interpreter, checks in it, and an emulator of Gluon."""
