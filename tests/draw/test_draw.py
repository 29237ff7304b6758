import io
import re
import sys
from collections import Counter
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, masks
from sparseflash.blockmask.stats import live_tokens
from sparseflash.draw import MEANINGS, kinds, panels, shares, to_html
from sparseflash.draw.colours import EMPTY, FULL, PARTIAL, colours
from sparseflash.draw.text import levels
from tests.drawn.dynamic_masks import made_dynamic
from tests.drawn.masks import SEEDS, block_masks
from tests.processes.forked import python

CELLS = st.integers(1, 12)


def uses(mask):
    batch, heads = mask.shape[:2]
    pattern = mask.pattern.expand(batch, heads).tolist()
    lengths = [None] * batch if mask.lengths is None else live_tokens(mask)
    dense = mask.to_dense()
    return [(pattern[b][h], lengths[b], dense[b, h].numpy()) for b in range(batch) for h in range(heads)]


def per_head(*densities, tokens=512, block=32, seed=0):
    rng = np.random.default_rng(seed)
    sides = (tokens // block, tokens // block)
    return BlockMask.from_layout(np.stack([rng.random(sides) < density for density in densities]), block=block)


def whole(dense, block_q, block_k):
    found = np.zeros_like(dense)
    for q in range(0, dense.shape[0], block_q):
        for k in range(0, dense.shape[1], block_k):
            tile = dense[q : q + block_q, k : k + block_k]
            found[q : q + block_q, k : k + block_k] = tile.shape == (block_q, block_k) and tile.all()
    return found


# ---------------------------------------------------------------------- shares


@given(block_masks(heads=2, batch=2), CELLS, CELLS)
def test_shares_are_the_means_of_the_dense_mask(mask, rows, cols):
    for pattern, lengths, dense in uses(mask):
        found = shares(mask, pattern, rows, cols, lengths=lengths)
        down, across = found.step[0] * mask.block_q, found.step[1] * mask.block_k
        full = whole(dense, mask.block_q, mask.block_k)
        assert found.live.shape == (-(-mask.q_len // down), -(-mask.k_len // across))
        for r in range(found.live.shape[0]):
            for c in range(found.live.shape[1]):
                cell = np.s_[r * down : (r + 1) * down, c * across : (c + 1) * across]
                assert found.full[r, c] == full[cell].mean()
                assert found.partial[r, c] == pytest.approx((dense & ~full)[cell].mean(), abs=1e-12)
                assert (found.live[r, c] == 0) == (not dense[cell].any())


@pytest.mark.parametrize(
    ("blocks", "most", "step"), [(1, 5, 1), (5, 5, 1), (6, 5, 2), (10, 5, 2), (11, 5, 4), (64, 1, 64)]
)
def test_a_cell_is_the_least_power_of_two_of_tiles_that_fits(blocks, most, step):
    mask = BlockMask.dense(16 * blocks, 16, block=16)
    assert shares(mask, rows=most, cols=7).step == (step, 1)
    assert shares(BlockMask.dense(16, 16 * blocks, block=16), rows=7, cols=most).step == (1, step)


def test_shares_of_a_million_tokens_add_up():
    mask = masks.butterfly(2**20)
    found = shares(mask)
    assert found.live.shape == (512, 512) and found.step == (16, 16)
    assert found.live.mean() == pytest.approx(mask.density, rel=1e-12)
    assert Counter((found.live * 256).ravel().tolist()) == {80.0: 512, 16.0: 512 * 9, 0.0: 512 * 502}


def test_shares_refuse_what_there_is_not():
    mask = per_head(0.2, 0.8)
    for pattern in (-1, 2):
        with pytest.raises(ValueError, match=rf"pattern must lie in 0..1; got {pattern}"):
            shares(mask, pattern)
    with pytest.raises(ValueError, match="rows and cols must be at least 1 cell; got 0 and 3"):
        shares(mask, 0, 0, 3)


# ---------------------------------------------------------------------- panels


def test_one_pattern_is_one_panel_without_a_title():
    mask = BlockMask.from_layout(torch.ones(2, 3, 4, 4, dtype=torch.bool), block=16)
    assert [panel.title for panel in panels(mask)] == [""]
    assert [panel.title for panel in panels(mask, heads=1)] == ["head 1"]
    assert [panel.title for panel in panels(mask, batch=1, heads=(0, 2))] == ["batch 1 · heads 0, 2"]


def test_panels_name_the_heads_and_batch_elements_that_share_a_pattern():
    eye, every = torch.eye(4, dtype=torch.bool), torch.ones(4, 4, dtype=torch.bool)
    by_head = BlockMask.from_layout(torch.stack([eye, every, eye, eye, eye]), block=16)
    assert [panel.title for panel in panels(by_head)] == ["heads 0, 2-4", "head 1"]
    by_batch = BlockMask.from_layout(torch.stack([eye, every])[:, None].expand(2, 3, 4, 4), block=16)
    assert [panel.title for panel in panels(by_batch)] == ["batch 0", "batch 1"]
    mixed = BlockMask.from_layout(torch.stack([torch.stack([eye, every]), torch.stack([eye, eye])]), block=16)
    assert [panel.title for panel in panels(mixed)] == ["batch 0 · head 0; batch 1", "batch 0 · head 1"]
    assert [panel.title for panel in panels(mixed, batch=0)] == ["batch 0 · head 0", "batch 0 · head 1"]


def test_sequences_of_different_lengths_are_different_panels():
    mask = BlockMask.dense(64, block=16).with_lengths(torch.tensor([50, 64, 50]))
    assert [(panel.title, panel.lengths) for panel in panels(mask)] == [
        ("batch 0, 2 (50 tokens)", (50, 50)),
        ("batch 1 (64 tokens)", (64, 64)),
    ]


def test_long_lists_of_heads_are_shortened():
    alternating = torch.eye(4, dtype=torch.bool).repeat(40, 1, 1)
    alternating[::2] = True
    titles = [panel.title for panel in panels(BlockMask.from_layout(alternating, block=16))]
    assert titles == ["heads 0, 2, 4, 6, 8, 10, ..., 38", "heads 1, 3, 5, 7, 9, 11, ..., 39"]


@given(block_masks(heads=3, batch=2))
def test_panels_cover_every_pattern_and_length_once(mask):
    found = [(panel.pattern, panel.lengths) for panel in panels(mask)]
    assert found == list(dict.fromkeys((pattern, lengths) for pattern, lengths, _ in uses(mask)))


@pytest.mark.parametrize(("name", "choice"), [("heads", 3), ("heads", -1), ("heads", []), ("batch", [0, 1])])
def test_heads_and_batch_elements_that_do_not_exist_are_refused(name, choice):
    with pytest.raises(ValueError, match=rf"{name} must be one or more of 0..\d; got {re.escape(repr(choice))}"):
        per_head(0.1, 0.2, 0.3).to_string(40, **{name: choice})


def test_heads_that_are_no_numbers_are_refused():
    for choice in (1.5, "0", [0, None], True):
        with pytest.raises(
            TypeError, match=rf"heads must be an integer, several, or None; got {re.escape(repr(choice))}"
        ):
            per_head(0.1, 0.2).plot(heads=choice)


# ---------------------------------------------------------------------- every score


@given(block_masks(heads=2, batch=2))
def test_kinds_hold_every_score_and_the_kind_of_its_tile(mask):
    for pattern, lengths, dense in uses(mask):
        found = kinds(mask, pattern, lengths=lengths)
        assert np.array_equal(found >= 2, dense)
        assert np.array_equal(found == 3, whole(dense, mask.block_q, mask.block_k))
        q_stop, k_stop = (mask.q_len, mask.k_len) if lengths is None else lengths
        first_q = np.arange(mask.q_len)[:, None] // mask.block_q * mask.block_q
        first_k = np.arange(mask.k_len) // mask.block_k * mask.block_k
        assert not found[(first_q >= q_stop) | (first_k >= k_stop)].any()
        if lengths is None:
            for q in range(0, mask.q_len, mask.block_q):
                for k in range(0, mask.k_len, mask.block_k):
                    tile = np.s_[q : q + mask.block_q, k : k + mask.block_k]
                    assert (found[tile] == 0).all() == (not dense[tile].any())


# ---------------------------------------------------------------------- colours


def test_full_and_partial_have_different_hues_and_any_live_score_is_seen():
    share = np.array([0.0, 1e-9, 0.1, 0.5, 1.0])
    none = np.zeros_like(share)
    blue, orange = colours(share, none).astype(int), colours(none, share).astype(int)
    assert tuple(blue[0]) == tuple(orange[0]) == EMPTY
    assert tuple(blue[-1]) == FULL and tuple(orange[-1]) == PARTIAL
    assert (blue[1:, 2] > blue[1:, 0]).all() and (orange[1:, 0] > orange[1:, 2]).all()
    assert (255 * 3 - blue[1:].sum(1) > 100).all() and (255 * 3 - orange[1:].sum(1) > 80).all()
    for ramp in (blue, orange):
        assert (np.diff(ramp.sum(1)) < 0).all()


# ---------------------------------------------------------------------- text


def drawing(text):
    return text.splitlines()[1:-1]


def test_text_of_a_small_mask_is_exact():
    live = torch.zeros(64, 80, dtype=torch.bool)
    live[:16, :16] = True
    live[16:32, 16:32] = torch.ones(16, 16).tril() > 0
    live[16, 32] = True
    live[32:48, 32:43] = True
    assert BlockMask.from_dense(live, block=16).to_string(40).splitlines() == [
        "BlockMask(64 x 80, blocks of 16, 4 tiles: 1 full + 3 partial (3 distinct), density 11.1 %)",
        "██········",
        "··▒▒░░····",
        "····▓▓····",
        "··········",
        "█ full  ▓▒░ partly live: 2/3, 1/3, less  · empty; a cell is 16 x 16 tokens",
    ]


def test_text_in_ascii_has_nothing_else():
    mask = masks.local(200, window=40, block=32)
    text = mask.to_string(40, ascii=True)
    assert text.isascii()
    plain = dict(zip("·░▒▓█", ".-+*#"))
    assert drawing(text) == ["".join(plain[glyph] for glyph in line) for line in drawing(mask.to_string(40))]


@given(block_masks(), st.integers(2, 50))
def test_text_fits_the_width_and_shows_the_level_of_every_cell(mask, width):
    for panel in panels(mask):
        cells = levels(shares(mask, panel.pattern, width // 2, width // 2, lengths=panel.lengths))
        expected = ["".join(2 * "·░▒▓█"[level] for level in row) for row in cells]
        assert max(map(len, expected)) <= width
        assert "\n".join(expected) in mask.to_string(width)


def test_text_levels_change_at_thirds_and_full_means_full_tiles():
    mask = masks.causal(512, block=16)
    coarse = shares(mask, rows=4, cols=4)
    assert levels(coarse).tolist() == [[2, 0, 0, 0], [4, 2, 0, 0], [4, 4, 2, 0], [4, 4, 4, 2]]
    assert drawing(BlockMask.dense(32, 40, block=16).to_string(40)) == ["████▓▓", "████▓▓"]


def test_text_draws_each_different_head_once_under_its_name():
    layout = np.zeros((3, 4, 4), dtype=bool)
    layout[0, 0, 0] = layout[2, 0, 0] = layout[1, 3, 3] = True
    text = BlockMask.from_layout(layout, block=16).to_string(40)
    assert drawing(text) == [
        "heads 0, 2:", "██······", "········", "········", "········",
        "head 1:", "········", "········", "········", "······██",
    ]  # fmt: skip
    assert drawing(BlockMask.from_layout(layout, block=16).to_string(40, heads=1))[0] == "head 1:"


def test_text_says_how_many_patterns_it_leaves_out():
    text = per_head(*np.linspace(0.1, 0.9, 20)).to_string(20)
    assert text.count("head ") == 16
    assert "(4 more patterns; select with heads= and batch=)" in text


def test_text_is_as_wide_as_the_terminal_by_default(monkeypatch):
    mask = BlockMask.dense(4096, block=16)
    for columns in (30, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert mask.to_string() == mask.to_string(columns)


def test_text_refuses_a_width_without_room():
    with pytest.raises(ValueError, match="width must be at least 2 columns; got 1"):
        BlockMask.dense(64).to_string(1)
    with pytest.raises(TypeError, match="width must be an integer number of columns; got 'wide'"):
        BlockMask.dense(64).to_string("wide")


# ---------------------------------------------------------------------- HTML

SVG = "{http://www.w3.org/2000/svg}"


def painted(drawing, shape):
    rgb = np.full((*shape, 3), 255)
    for path in drawing.iter(f"{SVG}path"):
        colour = [int(path.get("stroke")[i : i + 2], 16) for i in (1, 3, 5)]
        for x, y, length in re.findall(r"M(\d+) (\d+)h(\d+)", path.get("d")):
            assert (rgb[int(y), int(x) : int(x) + int(length)] == 255).all()
            rgb[int(y), int(x) : int(x) + int(length)] = colour
    return rgb


@given(block_masks(heads=2, batch=2))
def test_html_is_well_formed_and_draws_every_live_cell(mask):
    root = ElementTree.fromstring(mask._repr_html_())
    assert root.find("code").text == repr(mask)
    found = panels(mask)
    drawings = list(root.iter(f"{SVG}svg"))
    assert len(drawings) == min(len(found), 4)
    side = 64 if len(found) == 1 else 32
    for panel, element in zip(found, drawings):
        cells = shares(mask, panel.pattern, side, side, lengths=panel.lengths)
        rgb = painted(element, cells.live.shape)
        assert np.array_equal((rgb != 255).any(-1), cells.live > 0)
        assert (rgb[cells.full == 1] == FULL).all()
        only_partial = (cells.full == 0) & (cells.live > 0)
        assert (rgb[only_partial][:, 0] > rgb[only_partial][:, 2]).all()


@pytest.mark.parametrize("heads", [1, 4, 9])
def test_html_stays_below_64_kilobytes(heads):
    rng = np.random.default_rng(0)
    dense = rng.random((heads, 1024, 1024)) < rng.random((heads, 1024, 1024)) ** 2
    full = rng.random((heads, 64, 64)) < rng.random((heads, 64, 64))
    dense |= full.repeat(16, 1).repeat(16, 2)
    mask = BlockMask.from_dense(dense, block=16)
    html = to_html(mask)
    assert len(html.encode()) <= 64 * 1024
    assert ("and 5 more patterns" in html) == (heads == 9)
    ElementTree.fromstring(html)


def test_html_escapes_its_text(monkeypatch):
    monkeypatch.setattr(BlockMask, "__repr__", lambda self: "<script>&</script>")
    html = BlockMask.dense(64)._repr_html_()
    assert "<script>" not in html
    assert ElementTree.fromstring(html).find("code").text == "<script>&</script>"


def test_html_has_the_proportions_of_the_mask():
    (drawing,) = ElementTree.fromstring(masks.causal(100, 400, block=16)._repr_html_()).iter(f"{SVG}svg")
    assert (drawing.get("width"), drawing.get("height")) == ("240", "60")
    assert drawing.get("viewBox") == "0 0 25 6.25"


# ---------------------------------------------------------------------- matplotlib


def legend_of(holder):
    legend = holder.legends[0] if hasattr(holder, "legends") else holder.get_legend()
    return [text.get_text() for text in legend.get_texts()]


def test_plot_labels_axes_in_tokens_with_the_origin_at_the_top_left():
    mask = masks.local(1000, window=100, block=64)
    (axes,) = mask.plot(elements=False).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("key (token)", "query (token)")
    assert axes.get_xlim() == (0, 1000) and axes.get_ylim() == (1000, 0)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0", "250", "500", "750", "1000"]
    assert axes.images[0].get_extent() == [0, 1024, 1024, 0]
    assert axes.get_title() == f"{100 * mask.density:.3g} % live"


@pytest.mark.parametrize(
    ("length", "labels"),
    [
        (1, ["0", "1"]),
        (4096, ["0", "1024", "2048", "3072", "4096"]),
        (16_384, ["0", "4K", "8K", "12K", "16K"]),
        (2**20, ["0", "0.25M", "0.5M", "0.75M", "1M"]),
        (10_001, ["0", "2500", "5000", "7501", "10001"]),
    ],
)
def test_plot_shortens_round_numbers_of_tokens(length, labels):
    (axes,) = BlockMask.from_tiles(torch.zeros(1).long(), torch.zeros(1).long(), length).plot().axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == labels


@given(block_masks(300))
def test_plot_shades_each_tile_by_its_live_share(mask):
    figure = mask.plot(elements=False)
    for panel, axes in zip(panels(mask), figure.axes):
        found = shares(mask, panel.pattern, lengths=panel.lengths)
        assert found.step == (1, 1)
        assert np.array_equal(axes.images[0].get_array(), colours(found.full, found.partial))


def test_plot_of_a_long_mask_is_aggregated():
    (axes,) = masks.butterfly(2**20, causal=True).plot().axes
    assert axes.images[0].get_array().shape == (512, 512, 3)
    assert not axes.collections
    figure = masks.butterfly(2**20, causal=True).plot(cells=100)
    assert figure.axes[0].images[0].get_array().shape == (64, 64, 3)
    assert legend_of(figure)[1] == "128 x 128 tiles, all live"


def test_plot_draws_every_score_of_a_small_mask():
    mask = masks.local(200, window=40, block=32)
    figure = mask.plot()
    image = figure.axes[0].images[0].get_array()
    assert image.shape == (200, 200, 3)
    live = mask.to_dense()[0, 0].numpy()
    assert np.array_equal((image == PARTIAL).all(-1) | (image == FULL).all(-1), live)
    assert legend_of(figure) == list(MEANINGS[:3])
    assert mask.plot(elements=False).axes[0].images[0].get_array().shape == (7, 7, 3)
    for tokens, elements, side in ((1024, None, 1024), (1025, None, 33), (1025, True, 1025)):
        figure = masks.local(tokens, window=40, block=32).plot(elements=elements)
        assert figure.axes[0].images[0].get_array().shape == (side, side, 3)


def test_plot_has_a_grid_line_between_all_tiles_where_they_are_few():
    (axes,) = masks.local(1024, window=100, block=64).plot().axes
    down, across = (lines.get_segments() for lines in axes.collections)
    assert [each.tolist() for each in down] == [[[at, 0], [at, 1024]] for at in range(0, 1025, 64)]
    assert [each.tolist() for each in across] == [[[0, at], [1024, at]] for at in range(0, 1025, 64)]
    (axes,) = masks.local(65 * 64, window=100, block=64).plot().axes
    assert not axes.collections


def test_plot_by_head_has_a_panel_for_every_head_and_a_row_for_every_batch_element(monkeypatch):
    layout = torch.zeros(2, 3, 4, 4, dtype=torch.bool)
    layout[1, 2] = True
    mask = BlockMask.from_layout(layout, block=64)
    figure = mask.plot(by_head=True)
    titles = [f"batch {b} · head {h}\n{100 if b == 1 and h == 2 else 0} % live" for b in range(2) for h in range(3)]
    assert [axes.get_title() for axes in figure.axes] == titles
    assert [axes.get_subplotspec().get_geometry()[:2] for axes in figure.axes] == [(2, 3)] * 6
    chosen = mask.plot(by_head=True, batch=1, heads=[2, 0]).axes
    assert [axes.get_title().split("\n")[0] for axes in chosen] == ["batch 1 · head 2", "batch 1 · head 0"]
    assert per_head(*[0.5] * 11).plot(by_head=True).axes[0].get_subplotspec().get_geometry()[:2] == (2, 8)
    monkeypatch.setattr("sparseflash.draw.figure.MOST_IN_GRID", 6)
    many = per_head(*[0.5] * 7).plot(by_head=True)
    assert len(many.axes) == 6 and "the first 6 of 7 panels" in many.get_suptitle()
    with pytest.raises(TypeError, match="by_head must be True or False; got 2"):
        mask.plot(by_head=2)


def test_plot_says_how_many_patterns_it_leaves_out():
    figure = per_head(*np.linspace(0.1, 0.9, 20)).plot()
    assert len(figure.axes) == 16
    assert "the first 16 of 20 patterns" in figure.get_suptitle()


def test_plot_shows_padding():
    mask = BlockMask.dense(64, block=16).with_lengths(torch.tensor([40, 64]))
    for elements in (True, False):
        titles = [axes.get_title() for axes in mask.plot(elements=elements).axes]
        assert titles == ["batch 0 (40 tokens)\n39.1 % live", "batch 1 (64 tokens)\n100 % live"]


def test_plot_legend_tells_only_of_what_is_drawn():
    assert legend_of(masks.butterfly(1024).plot()) == [MEANINGS[0], MEANINGS[3]]
    assert legend_of(masks.local(1024, window=4).plot()) == list(MEANINGS[:3])
    assert legend_of(masks.butterfly(2048).plot()) == ["empty: skipped", "full tile"]
    assert legend_of(masks.local(2048, window=4).plot()) == [
        "empty: skipped",
        "partial tile, 90 % live",
        "partial tile, 10 % live",
    ]
    both = torch.ones(2, 512, 512, dtype=torch.bool)
    both[1] = torch.eye(512, dtype=torch.bool)
    assert len(legend_of(BlockMask.from_dense(both).plot())) == 4
    assert masks.butterfly(1024).plot(legend=False).legends == []


def test_a_file_name_is_no_axes():
    with pytest.raises(
        TypeError, match=r"ax must be a matplotlib Axes or None; got 'a\.png'\. To write a file: mask\.plot"
    ):
        BlockMask.dense(64).plot("a.png")


def test_plot_draws_into_axes_that_are_given():
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    mask = masks.causal(512, block=64)
    assert mask.plot(axes) is axes
    assert len(axes.images) == 1
    assert legend_of(axes) == list(MEANINGS)
    assert per_head(0.1, 0.9).plot(axes, heads=1, legend=False) is axes
    with pytest.raises(ValueError, match=r"ax must be None to draw 2 distinct patterns; select one with heads="):
        per_head(0.1, 0.9).plot(axes)


def test_plot_refuses_every_score_of_a_long_mask_and_no_cells():
    with pytest.raises(ValueError, match="elements=True must have at most 4096 queries and keys; got 4097"):
        masks.local(4097, window=10).plot(elements=True)
    with pytest.raises(ValueError, match="cells must be at least 1 per side; got 0"):
        masks.local(100, window=10).plot(cells=0)


def test_plot_saves_without_display_pyplot_or_a_chosen_backend():
    program = """
import io, sys
from sparseflash import BlockMask
file = io.BytesIO()
BlockMask.dense(300, block=64).plot().savefig(file)
assert file.getvalue().startswith(b"\\x89PNG")
assert "matplotlib.pyplot" not in sys.modules
"""
    done = python("-c", program, environment={"PATH": ""})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("shape", [(16, 2000), (2000, 16), (7, 7), (1, 1)])
def test_plot_of_any_shape_can_be_saved(shape):
    file = io.BytesIO()
    BlockMask.dense(*shape, block=16).plot().savefig(file, dpi=50)
    assert file.getvalue().startswith(b"\x89PNG")


def test_plot_names_the_extra_that_it_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"plot needs matplotlib: pip install sparseflash\[plot\]"):
        BlockMask.dense(64).plot()


@pytest.mark.gpu
def test_masks_on_the_gpu_are_drawn_alike():
    mask = masks.local(300, window=100, block=32)
    on_gpu = mask.to("cuda")
    assert drawing(on_gpu.to_string(60)) == drawing(mask.to_string(60))
    assert np.array_equal(kinds(on_gpu), kinds(mask))
    padded = mask.with_lengths(torch.tensor([77]))
    assert drawing(padded.to("cuda").to_string(60)) == drawing(padded.to_string(60))


@given(block_masks(most_tokens=100, heads=2), SEEDS)
def test_dynamic_masks_are_drawn_as_their_canonical_form(mask, seed):
    dynamic = made_dynamic(mask, seed)
    assert dynamic.to_string(40) == mask.to_string(40)
    assert dynamic._repr_html_() == mask._repr_html_()


def test_a_figure_of_no_batch_element_is_refused():
    pytest.importorskip("matplotlib")
    nobody = BlockMask.dense(64, block=32).with_lengths(torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="at least one batch element to be drawn; got lengths of no sequence"):
        nobody.plot()
