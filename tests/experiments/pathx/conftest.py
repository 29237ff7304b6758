import pytest

from experiments.pathx.data.stream import Stream


@pytest.fixture(scope="module")
def stream():
    with Stream(0) as stream:
        yield stream
