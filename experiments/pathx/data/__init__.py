"""From generated images to batches: packed tokens, hidden pixels, worker processes."""
