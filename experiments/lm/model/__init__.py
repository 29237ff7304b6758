"""The model, its attention by pattern and by implementation, and its loss."""
