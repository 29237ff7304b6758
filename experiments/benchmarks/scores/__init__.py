"""The cost of score modifications beside plain attention and FlexAttention: `python -m experiments.benchmarks.scores`.

May import the library, `measurements`, and of benchmarks `harness`, `timing`, `interpreter`, `fresh_process` and the
speed benchmark's `flexattention`.
"""
