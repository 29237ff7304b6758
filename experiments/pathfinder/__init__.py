"""Pathfinder: generate, render and judge images with the parameters of the Long Range Arena.

    python -m experiments.pathfinder generate --size 128 --contour 14
    python -m experiments.pathfinder --help

This package imports nothing here, so that the generator's worker processes start quickly.
"""
