"""The cost of a live score under masks of small blocks, by kernel and tiling.

Commands: ``python -m experiments.benchmarks.blocks`` and ``.blocks.fit``. May import the library and its `backends`,
`training`, `measurements`, and of benchmarks `harness`, `interpreter`, `speed` and `tune`.
"""
