"""Comparisons that tests of several folders share: with fp64 results, with dense masks, and in portions."""
