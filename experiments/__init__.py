"""Training runs and measurements with sparseflash; the library imports nothing from here.

`training` is shared by all trainers. `lm`, `lra`, `pathx`, `pathfinder` and `selection` are tasks with their trainers,
`benchmarks` measures the library, and `results` stores the findings.
"""
