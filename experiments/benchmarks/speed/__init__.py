"""Speed of sparseflash beside its peers: ``python -m experiments.benchmarks.speed``, see README.md here."""
