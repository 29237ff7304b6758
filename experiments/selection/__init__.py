"""Attention that chooses its blocks at every step, made of the library's pieces: NSA, MoBA, shared groups, VSA.

    python -m experiments.selection --preset cpu --out runs/selection

trains each of them, and fixed patterns and dense attention beside them, on associative recall, where it is known which
block every query needs. May import `training` and the library.
"""
