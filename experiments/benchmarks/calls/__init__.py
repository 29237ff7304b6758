"""The host overhead of a call, beside PyTorch's own attention: microseconds of calls so short that the GPU waits.

See `python -m experiments.benchmarks.calls --help`. May import the library, its `launcher` (to bypass it),
and of benchmarks `harness`, `timing` and `fresh_process`.
"""
