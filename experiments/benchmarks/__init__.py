"""Measurements of the library, one folder each: calls, speed, io, tune, blocks, compile, exactness, patterns,
selection, decode, layer, huggingface.

A folder may import the library and `experiments.training`, and another measurement only where its docstring says so.
Of benchmarks, other folders import `timing` alone.
"""
