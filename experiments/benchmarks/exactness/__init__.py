"""How exact results are: the drawn cases of a test run, from the records that the tests leave; and large cases, which
are run here.

Commands: ``python -m experiments.benchmarks.exactness drawn`` and ``large``. May import `training`, `timing`,
`interpreter`, the library as any user does, and `backends/reference.py`, the plain implementation.
"""
