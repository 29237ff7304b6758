"""What attention costs in operations, bytes and time: ``python -m experiments.io``, see README.md."""
