"""Training runs and measurements with sparseflash; the library imports nothing from here.

`training` is shared by all trainers, `benchmarks` measures the library, `results` stores the findings; the others are
tasks with their trainers.
"""
