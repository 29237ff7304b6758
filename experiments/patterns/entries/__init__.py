"""The entries of the catalogue, a file a group or two."""
