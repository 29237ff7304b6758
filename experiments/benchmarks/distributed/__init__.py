"""Attention over several ranks."""
