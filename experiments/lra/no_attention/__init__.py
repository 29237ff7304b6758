"""Models without attention, as baselines."""
