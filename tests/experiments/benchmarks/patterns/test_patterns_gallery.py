import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image
from typer.testing import CliRunner

from experiments.benchmarks.patterns import __main__ as cli
from experiments.benchmarks.patterns import gallery
from experiments.benchmarks.patterns.catalogue import PATTERNS, Pattern
from sparseflash import BlockMask, masks
from sparseflash.draw.colours import FULL


def local(name, group="windows", rule="near"):
    return Pattern(name, group, rule, lambda n, block: masks.local(n, window=40, block=block))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("gallery") / "deeper" / "gallery.png"
    pages, draw = [], gallery.page
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gallery, "page", lambda *args, **options: pages.append(draw(*args, **options)) or pages[-1])
        result = CliRunner().invoke(cli.app, ["gallery", "--out", str(path)])
    assert result.exit_code == 0, result.output
    return result.output, path, pages[0]


def test_gallery_command_writes_a_small_picture(whole):
    output, path, _ = whole
    assert f"{len(PATTERNS)} patterns" in output
    with Image.open(path) as picture:
        assert picture.width == 5 * gallery.SIDE
    assert path.stat().st_size < 600_000


def test_page_has_a_titled_panel_for_each_pattern(whole):
    figure = whole[2]
    assert [panel.get_title().split("\n")[0] for panel in figure.axes] == [pattern.name for pattern in PATTERNS]
    for panel, pattern in zip(figure.axes, PATTERNS):
        assert panel.get_xlabel().replace("\n", " ") == pattern.rule
        assert f"{100 * pattern.build(1024, 32).density:.3g} % live" in panel.get_title()
        assert panel.images[0].get_array().shape == (1024, 1024, 3)  # single scores
    assert [text.get_text() for text in figure.texts[1:]] == list(dict.fromkeys(p.group for p in PATTERNS))


def test_texts_fit_their_panels(whole):
    figure = whole[2]
    renderer = FigureCanvasAgg(figure).get_renderer()
    for panel in figure.axes:
        for text, height in ((panel.title, gallery.ABOVE), (panel.xaxis.label, gallery.BELOW)):
            box = text.get_window_extent(renderer)
            assert box.width < gallery.SIDE and box.height < height, text.get_text()


def test_page_draws_the_second_head_and_says_so():
    layout = torch.stack([torch.eye(4), torch.eye(4).flip(0)]).bool()
    two = Pattern("two", "heads", "1", lambda n, block: BlockMask.from_layout(layout, block=16))
    (panel,) = gallery.page([two], 64, 16).axes
    assert panel.get_title() == "two\n25 % live, head 1 of 2"
    assert tuple(panel.images[0].get_array()[0, -1]) == FULL


def test_panels_keep_apart_and_on_the_page():
    patterns = [local(f"{i}", group) for group in "ab" for i in range(7)]
    figure = gallery.page(patterns, 64, 16)
    boxes = [panel.get_position() for panel in figure.axes]
    for number, box in enumerate(boxes):
        assert 0 < box.x0 < box.x1 < 1 and 0 < box.y0 < box.y1 < 1
        assert not any(box.overlaps(other) for other in boxes[:number])
    size = figure.get_size_inches() * gallery.DPI
    corners = np.array([[(box.x0, box.y0), (box.width, box.height)] for box in boxes]) * size
    assert np.allclose(corners, corners.round(), atol=1e-6)
    assert np.allclose(corners[:, 1], gallery.CELLS)


def test_gallery_command_draws_some_and_refuses_unknown_names(tmp_path):
    path = tmp_path / "one.png"
    options = ["gallery", "--out", str(path), "--tokens", "64", "--block", "16", "--only"]
    assert "1 patterns" in CliRunner().invoke(cli.app, [*options, "causal"]).output
    result = CliRunner().invoke(cli.app, [*options, "nothing"])
    assert result.exit_code == 2
    assert "--only must be from dense | causal" in " ".join(result.output.replace("│", " ").split())
    result = CliRunner().invoke(cli.app, [*options, "causal", "--block", "100"])
    assert result.exit_code == 2
    assert "--block must be from 16, 32, 64, 128, 256; got 100." in " ".join(result.output.replace("│", " ").split())
