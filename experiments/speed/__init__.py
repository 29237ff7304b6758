"""Speed of sparseflash beside its peers: ``python -m experiments.speed``, see README.md here."""
