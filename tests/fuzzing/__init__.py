"""Random calls of the public API: each gives a right result, or one clear error."""
