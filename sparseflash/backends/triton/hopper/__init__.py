"""Gluon kernels for Hopper GPUs (sm_90). They take the same masks as the portable kernels."""
