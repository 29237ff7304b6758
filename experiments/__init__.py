"""Training runs and measurements with sparseflash; nothing in the library imports them.

`training` is what all trainers share; `lra`, `pathx`, `pathfinder` and `selection` are each a task with its trainer;
`benchmarks` are measurements of the library; `results` has what all of them have found. What a folder may import stands
in its own docstring; lra and pathx may not import one another.
"""
