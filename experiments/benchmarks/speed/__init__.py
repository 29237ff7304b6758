"""Speed of sparseflash beside its peers: ``python -m experiments.benchmarks.speed``, see README.md here.

May import the library and its `arguments`, and `harness`. Its cases, masks and peers are also for benchmarks.tune,
layer, decode, selection and scores.
"""
