"""Path-X and Path-256 with block-sparse attention: a curriculum over fresh images, masks chosen for every layer.

    python -m experiments.pathx train --help

The images have the Long Range Arena's parameters and are generated: results are of "LRA-parameter generated Path-X".
May import the library, `training` and the images of `pathfinder`. No other folder imports it.
"""
