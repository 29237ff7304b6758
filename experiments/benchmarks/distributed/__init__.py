"""Attention over several ranks. May import `harness`, `training` and the library."""
