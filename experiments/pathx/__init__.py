"""Path-X and Path-256 with block-sparse attention: a curriculum over fresh images, a mask for each layer."""
