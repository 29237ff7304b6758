"""Pathfinder: images with the parameters of the Long Range Arena, and accuracies without tracing.

    python -m experiments.pathfinder generate --size 128 --contour 14
    python -m experiments.pathfinder --help

This file imports nothing, so that the generator's worker processes start quickly.
"""
