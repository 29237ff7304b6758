"""Path-X and Path-256 with block-sparse attention: a curriculum over fresh images, a mask for each layer.

    python -m experiments.pathx train --help

The images are generated with the Long Range Arena's parameters: results are on "LRA-parameter generated Path-X".
"""
