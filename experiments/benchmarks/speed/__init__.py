"""Speed of sparseflash beside its peers: ``python -m experiments.benchmarks.speed``, see README.md here.

May import the library and its `arguments`, `training` and benchmarks.timing. Its cases, patterns and checks are for
benchmarks.tune and benchmarks.blocks, too.
"""
