"""Fixtures of several of these files."""

import pytest

from experiments.pathx.data.stream import Stream


@pytest.fixture(scope="module")
def stream():
    """Batches that this process makes itself."""
    with Stream(0) as stream:
        yield stream
