"""How exact results are. `drawn` summarises the records of a test run; `large` runs cases near numeric limits.

Commands: ``python -m experiments.benchmarks.exactness drawn`` and ``large``. May import `harness`, `measurements`,
`training`, `timing`, `interpreter`, the library as any user does, and `backends/reference.py`, the plain
implementation.
"""
