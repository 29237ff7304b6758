import numpy as np
import pytest
from PIL import Image

from experiments.pathfinder.parameters import lra
from experiments.pathfinder.stamps import UNIT, marker_window, markers, quantise
from experiments.pathfinder.tables import digest


# With Pillow 12.3.0 and 13.0.0. Where they change, all images do.
@pytest.mark.parametrize(
    ("size", "known"),
    [(32, "6201fdfcb63749ee"), (64, "3cd7f9dd08c14350"), (128, "230771b70ce2d74c"), (256, "f8d89fb35c48a6a2")],
)
def test_stamps_are_known(size, known):
    assert digest(lra(size, 14)) == digest(lra(size, 6)) == known


@pytest.mark.parametrize("place", [(0, 0), (1, 40), (63, 2), (30, 30), (62, 63), (8, 55)])
def test_markers_are_those_drawn_on_the_whole_image(place):
    p = lra(64, 14)
    y, x = np.mgrid[: 2 * p.size, : 2 * p.size]
    inside = (y - 2 * place[0]) ** 2 + (x - 2 * place[1]) ** 2 <= (2 * p.marker_radius) ** 2
    drawn = Image.fromarray(inside.astype(np.float32)).resize((p.size, p.size), Image.Resampling.LANCZOS)
    width = marker_window(p.size, p.marker_radius)
    top, left = (min(max(along - width // 2, 0), p.size - width) for along in place)
    ours = np.zeros((p.size, p.size))
    window = markers(p.size, p.marker_radius)[place[0] - top, place[1] - left]
    ours[top : top + width, left : left + width] = window / UNIT
    assert np.abs(ours - np.asarray(drawn)).max() < 1 / UNIT


def test_too_bright_a_picture_is_refused():
    with pytest.raises(ValueError, match=r"a contrast must be at most 3; got a picture of brightness 4\.0"):
        quantise(np.array([[4.0]]))
