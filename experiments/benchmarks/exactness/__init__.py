"""How exact the drawn cases of a test run were: from the records that the tests leave to a table.

Command: ``python -m experiments.benchmarks.exactness``. May import `training`.
"""
