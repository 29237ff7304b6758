"""Transformer layers shared by the models of all trainers."""
