"""The gallery: a panel a pattern, groups in rows, one small file."""

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from experiments.patterns import cli, gallery
from experiments.patterns.catalogue import PATTERNS, Pattern
from sparseflash import BlockMask, masks


def local(name, group="windows", rule="near"):
    return Pattern(name, group, rule, lambda n, block: masks.local(n, 40, block=block))


def test_page_has_a_titled_panel_for_each_pattern():
    seen = []
    figure = gallery.page(PATTERNS, 256, 32, done=seen.append)
    assert [panel.get_title().split("\n")[0] for panel in figure.axes] == [pattern.name for pattern in PATTERNS]
    assert seen == PATTERNS
    for panel, pattern in zip(figure.axes, PATTERNS):
        assert panel.get_xlabel().replace("\n", " ") == pattern.rule
        assert f"{100 * pattern.build(256, 32).density:.3g} % live" in panel.get_title()
        assert panel.images[0].get_array().shape == (8, 8, 3)  # tiles
        assert panel.get_legend() is None
    assert [text.get_text() for text in figure.texts[1:]] == list(dict.fromkeys(p.group for p in PATTERNS))


def test_page_draws_every_score_where_asked():
    figure = gallery.page([local("a")], 100, 16, elements=True)
    assert figure.axes[0].images[0].get_array().shape == (100, 100, 3)


def test_page_says_which_head_it_draws():
    two = Pattern(
        "two", "heads", "1", lambda n, block: BlockMask.from_layout(torch.eye(4).bool().repeat(2, 1, 1), block=16)
    )
    (panel,) = gallery.page([two], 64, 16).axes
    assert panel.get_title() == "two\n25 % live, head 0 of 2"


@pytest.mark.parametrize("columns", [1, 3, 5])
def test_panels_keep_apart_and_on_the_page(columns):
    patterns = [local(f"{i}", group) for group in "ab" for i in range(4)]
    figure = gallery.page(patterns, 64, 16, columns=columns)
    boxes = [panel.get_position() for panel in figure.axes]
    for number, box in enumerate(boxes):
        assert 0 < box.x0 < box.x1 < 1 and 0 < box.y0 < box.y1 < 1
        assert not any(box.overlaps(other) for other in boxes[:number])
    width, height = figure.get_size_inches()
    assert np.allclose([box.width * width for box in boxes], [box.height * height for box in boxes])  # squares


def test_gallery_command_writes_a_small_picture(tmp_path):
    path = tmp_path / "deeper" / "gallery.png"
    result = CliRunner().invoke(cli.app, ["gallery", "--out", str(path), "--tokens", "256", "--block", "16"])
    assert result.exit_code == 0, result.output
    assert f"{len(PATTERNS)} patterns" in result.output
    with Image.open(path) as picture:
        assert picture.width == 1300
    assert path.stat().st_size < len(PATTERNS) * 10_000  # so that sixty patterns stay below 600 KB


def test_gallery_command_draws_some_and_refuses_unknown_names(tmp_path):
    path = tmp_path / "one.png"
    options = ["gallery", "--out", str(path), "--tokens", "64", "--block", "16", "--only"]
    assert "1 patterns" in CliRunner().invoke(cli.app, [*options, "causal"]).output
    result = CliRunner().invoke(cli.app, [*options, "nothing"])
    assert result.exit_code == 2
    assert "a pattern must be one of" in result.output
