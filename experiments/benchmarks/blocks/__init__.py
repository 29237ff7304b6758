"""What a live score costs under masks of small blocks, by kernel, and in which tiles.

Commands: ``python -m experiments.benchmarks.blocks`` and ``.blocks.fit``. May import the library and its `backends`,
`training`, `measurements`, and of benchmarks `harness`, `interpreter`, `speed` and `tune`.
"""
