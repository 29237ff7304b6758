"""Whether results are exact near numeric limits, for one GPU with 60 GB: python -m tests.limits."""
