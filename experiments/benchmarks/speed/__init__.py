"""Speed of sparseflash beside its peers: ``python -m experiments.benchmarks.speed``, see README.md here.

Its cases, masks and peers are also for benchmarks.tune, layer, decode, selection and scores.
"""
