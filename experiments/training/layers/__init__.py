"""Transformer layers shared by the models of all trainers. May import only the library."""
