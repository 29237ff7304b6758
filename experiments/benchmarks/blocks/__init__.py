"""What a live score costs under masks of small blocks, by kernel, and in which tiles.

Commands: ``python -m experiments.benchmarks.blocks`` and ``.blocks.fit``. May import the library and its `backends`,
`training`, and of benchmarks `timing`, `interpreter`, `speed` and `tune`.
"""
