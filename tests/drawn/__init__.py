"""Hypothesis strategies: each drawn value is a recipe whose repr builds it again."""
