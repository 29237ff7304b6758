"""Measurements of the library, beside others' and by model: speed, io, tune, blocks, compile, exactness, patterns.

They may import one another, `experiments.training` and no other folder of experiments. Others import `timing` alone.
"""
