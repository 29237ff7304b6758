"""How exact results are. `drawn` summarises the records of a test run; `large` runs cases near numeric limits.

Commands: ``python -m experiments.benchmarks.exactness drawn`` and ``large``.
"""
