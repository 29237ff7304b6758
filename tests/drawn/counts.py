"""How many examples a Hypothesis test draws."""

from hypothesis import settings


def examples_times(factor: float) -> settings:
    """The profile's number of examples times `factor`, rounded down, but at least one. A decorator of a test."""
    return settings(max_examples=max(1, int(settings().max_examples * factor)))
