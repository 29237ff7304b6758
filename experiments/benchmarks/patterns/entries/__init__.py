"""The entries of the catalogue: one file for each one or two groups of patterns."""
