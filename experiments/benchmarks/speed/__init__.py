"""Speed of sparseflash beside its peers: ``python -m experiments.benchmarks.speed``, see README.md here.

May import the library and its `arguments`, `measurements`, benchmarks.timing, benchmarks.harness and
benchmarks.fresh_process. Its cases, patterns and checks are also for benchmarks.tune, blocks and layer.
"""
