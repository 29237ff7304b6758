"""Training runs and measurements with sparseflash; nothing in the library imports them.

training is what all trainers share. lra, pathx and pathfinder are each a task with its trainer, benchmarks are
measurements of the library, results holds what all of them have found. training imports no other folder; benchmarks and
pathfinder import training; lra and pathx import training, pathfinder and benchmarks.timing, and not one another.
"""
