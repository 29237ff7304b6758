"""Pathfinder: images with the parameters of the Long Range Arena, and accuracies without tracing.

This file imports nothing, so that the generator's worker processes start quickly.
"""
