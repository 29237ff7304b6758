"""Gluon kernels for Hopper GPUs (sm_90)."""
