"""How exact results are."""
