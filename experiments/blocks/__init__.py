"""What a live score costs under masks of small blocks, by kernel, and in which tiles."""
