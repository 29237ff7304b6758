"""The entries of the catalogue, by groups."""
