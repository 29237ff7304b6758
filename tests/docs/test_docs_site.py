import re
import sys

import pytest

from tests.docs.pages import ROOT

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def hooks():
    pytest.importorskip("mkdocs")
    sys.path.insert(0, str(DOCS))
    try:
        import hooks
    finally:
        sys.path.remove(str(DOCS))
    return hooks


@pytest.mark.parametrize(
    ("uri", "link", "expected"),
    [
        ("faq.md", "[a](results.md#speed-by-density)", "[a](results.md#speed-by-density)"),
        ("index.md", "![a](docs/pages/images/masks.png) [b](docs/pages/faq.md)", "![a](images/masks.png) [b](faq.md)"),
        ("models/pytorch.md", "[a](../../../CONTRIBUTING.md)", "[a](../contributing.md)"),
        ("patterns/define.md", "[a](../../../masks/README.md#conventions)", "[a](catalogue.md#conventions)"),
        ("patterns/catalogue.md", "![a](gallery.png)", "![a](../pictures/masks/gallery.png)"),
        ("contributing.md", "[`masks/`](masks)", "`masks`{.path}"),
        ("faq.md", "[lm](../../experiments/lm/README.md)", "[lm](repository/experiments/lm/README.md)"),
        ("faq.md", "[lm](../../experiments/lm#a)", "[lm](repository/experiments/lm/README.md#a)"),
        (
            "models/train.md",
            "[f](../../../experiments/results/patterns.json)",
            "[f](../repository/experiments/results/patterns.json)",
        ),
        ("repository/experiments/lm/README.md", "[r](../results/README.md)", "[r](../results/README.md)"),
        (
            "faq.md",
            "[`mask`](../../experiments/lra/custom_mask.py)",
            "`mask` (`experiments/lra/custom_mask.py`{.path})",
        ),
        ("tutorial.md", "[n](notebooks/pattern.ipynb)", "[n](notebooks/pattern.md)"),
        ("results.md", "[a run](../../experiments/results/a.md)", "a run (`experiments/results/a.md`{.path})"),
        ("results.md", "(H200, [run](../../masks/a.md))", "(H200, run: `masks/a.md`{.path})"),
        ("results.md", "| `a \\| b` \\| c |", "| `a | b` \\| c |"),
        ("results.md", "`1 s`: 16 s, 5 % of 3 steps", "`1 s`: 16\N{NO-BREAK SPACE}s, 5\N{NO-BREAK SPACE}% of 3 steps"),
        ("faq.md", "[a](https://example.org/x)", "[a](https://example.org/x)"),
        ("faq.md", "```\\n[a](../../README.md)\\n```", "```\\n[a](../../README.md)\\n```"),
    ],
)
def test_links_out_of_the_site_are_rewritten(hooks, uri, link, expected):
    assert hooks.rewritten(link.replace("\\n", "\n"), uri) == expected.replace("\\n", "\n")


def test_links_lead_to_the_repository_if_it_has_an_address(hooks):
    text = "[the run](../../experiments/results/README.md)"
    assert hooks.rewritten(text, "results.md", "https://example.org/r/") == (
        "[the run](https://example.org/r/blob/main/experiments/results/README.md)"
    )


def test_links_to_copied_files_lead_to_the_repository_instead_if_it_has_an_address(hooks):
    text = "[lm](../../experiments/lm/README.md)"
    assert "example.org/r/blob/main/experiments/lm/README.md" in hooks.rewritten(
        text, "faq.md", "https://example.org/r"
    )


def test_copies_are_those_of_files_that_exist(hooks):
    text = "[a](../../experiments/results/README.md) [b](../../experiments/results/none.md) [c](../../CONTRIBUTING.md)"
    assert hooks.copies_in(text, "faq.md") == {"experiments/results/README.md"}


def test_a_family_of_patterns_has_a_picture_of_each_that_leads_to_it(hooks):
    text = (
        "## A\n\n<!-- pictures -->\n\n::: sparseflash.masks.dense.dense\n\n## B\n\n::: sparseflash.masks.local.local\n"
    )
    shown = hooks.with_thumbnails(text)
    assert (
        "[![dense](images/dense.png){.pattern}](#sparseflash.masks.dense.dense)" in shown and "local.png" not in shown
    )
    assert all(picture.startswith(b"\x89PNG") for picture in hooks.patterns().values())
    page = (DOCS / "pages" / "reference" / "masks.md").read_text()
    assert set(hooks.patterns()) <= set(re.findall(r"images/(\w+)\.png", hooks.with_thumbnails(page)))


def test_a_notebook_becomes_a_page_with_its_outputs():
    from types import SimpleNamespace

    from docs.notebooks import markdown

    class Output(dict):
        __getattr__ = dict.__getitem__

    outputs = [
        Output(output_type="stream", text="one\n"),
        Output(output_type="display_data", data={"image/png": "cG5n", "text/plain": "<Figure>"}),
        Output(output_type="execute_result", data={"text/plain": "3"}),
        Output(output_type="execute_result", data={"text/html": "<b>4</b>\n", "text/plain": "4"}),
    ]
    cells = [
        SimpleNamespace(cell_type="markdown", source="# A"),
        SimpleNamespace(cell_type="code", source="f()", outputs=outputs),
    ]
    text, pictures = markdown(cells, "a")
    assert pictures == {"a-1.png": b"png"}
    assert [part.splitlines()[0] for part in text.split("\n\n")] == [
        "# A", "```python", "```text", "![What the code above draws](a-1.png)", "```text", "<div><b>4</b></div>",
    ]  # fmt: skip


def test_a_module_that_nothing_has_imported_yet_has_a_heading(hooks, monkeypatch):
    import sparseflash.merge

    monkeypatch.delattr(sparseflash, "merge")
    assert hooks.public_name("sparseflash.merge.merge_attention") == "sparseflash.merge_attention"


def test_headings_of_the_reference_are_the_names_that_one_imports(hooks):
    text = "# a\n\n::: sparseflash.attention.attention\n\n::: sparseflash.masks.sparse_transformer.fixed\n"
    assert hooks.with_public_names(text) == (
        "# a\n\n::: sparseflash.attention.attention\n"
        "    options: {heading: sparseflash.attention, heading_level: 2}\n\n"
        "::: sparseflash.masks.sparse_transformer.fixed\n"
        "    options: {heading: sparseflash.masks.fixed, heading_level: 2}\n"
    )
    text = "# a\n\n## b\n\n::: sparseflash.blockmask.BlockMask\n    options: {members: false}\n"
    assert hooks.with_public_names(text).endswith(
        "    options: {heading: sparseflash.BlockMask, heading_level: 3, members: false}\n"
    )
    assert hooks.public_name("sparseflash.blockmask.BlockMask.load") == "sparseflash.BlockMask.load"
    assert hooks.public_name("sparseflash.distributed.attention.attention") == "sparseflash.distributed.attention"
    assert hooks.public_name("sparseflash.analysis.lint.lint") == "sparseflash.analysis.lint"


def test_doctests_in_docstrings_become_code():
    griffe = pytest.importorskip("griffe")
    assert griffe
    sys.path.insert(0, str(DOCS))
    try:
        from doctests import fenced
    finally:
        sys.path.remove(str(DOCS))
    text = "Sums.\n\n>>> f(\n...     1)\n[0, 1]\n\nArgs:\n    x: a number.\n"
    assert fenced(text) == "Sums.\n\n```pycon\n>>> f(\n...     1)\n[0, 1]\n```\n\nArgs:\n    x: a number.\n"
    assert fenced("Nothing.\n") == "Nothing.\n"
    assert fenced(">>> f(1)  # doctest: +ELLIPSIS\n[0...") == "```pycon\n>>> f(1)\n[0...\n```"


def test_methods_that_a_class_binds_are_shown_as_methods():
    griffe = pytest.importorskip("griffe")
    extensions = griffe.load_extensions(str(DOCS / "doctests.py"), str(DOCS / "methods.py"))
    shown = griffe.load("sparseflash", search_paths=[str(ROOT)], extensions=extensions)["blockmask.mask.BlockMask"]
    crop, load = shown.members["crop"], shown.members["load"]
    assert (crop.is_function, [each.name for each in crop.parameters]) == (True, ["q", "k"])
    assert crop.docstring.value.count("```pycon") == 1
    assert (load.is_function, [each.name for each in load.parameters]) == (True, ["path", "device"])
    assert load.labels == {"classmethod"}
    public = {name: each for name, each in shown.members.items() if not name.startswith("_")}
    assert {name for name, each in public.items() if each.is_function and each.docstring is None} == set()
    fields = {each.name for each in shown.parameters}
    properties = {name for name, each in public.items() if "property" in each.labels}
    assert {name for name, each in public.items() if not each.is_function} - properties - fields == {"words"}


def test_every_page_is_in_the_list_of_pages_and_the_other_way_round():
    listed = set(re.findall(r": ([\w/-]+\.md)$|- ([\w/-]+\.md)$", (DOCS / "mkdocs.yml").read_text(), re.MULTILINE))
    listed = {first or second for first, second in listed}
    written = {str(path.relative_to(DOCS / "pages")) for path in (DOCS / "pages").rglob("*.md")}
    notebooks = {str(path.relative_to(DOCS / "pages").with_suffix(".md")) for path in (DOCS / "pages").rglob("*.ipynb")}
    assert listed - written == {"changelog.md", "contributing.md", "index.md", "patterns/catalogue.md", *notebooks}
    assert written - listed == set()


def test_the_reference_names_what_there_is_and_all_public_patterns_and_comparisons(hooks):
    from sparseflash import BlockMask, masks, testing

    named = {}
    for path in (DOCS / "pages" / "reference").glob("*.md"):
        for name in re.findall(r"^::: ([\w.]+)$", path.read_text(), re.MULTILINE):
            try:
                named[name] = hooks.located(name)
            except (AttributeError, ImportError) as error:
                raise AssertionError(f"{path.name} names {name}, which does not exist") from error
    for public in (masks, testing):
        assert {name for name in public.__all__ if getattr(public, name) not in named.values()} == set()
    methods = {
        name for name, each in vars(BlockMask).items() if isinstance(each, classmethod | property) or callable(each)
    }
    shown = {name.rpartition(".")[2] for name in named if ".BlockMask." in name}
    assert {name for name in methods if not name.startswith("_")} - shown == set()


def test_every_picture_is_drawn_and_every_drawing_is_stored():
    from docs.pictures.__main__ import FIGURES

    stored = {path.name for path in (DOCS / "pages" / "images").iterdir()}
    assert stored == set(FIGURES)
    text = "".join(path.read_text() for path in [ROOT / "README.md", *(DOCS / "pages").rglob("*.md")])
    assert {name for name in stored if f"images/{name})" not in text} == set()


def test_the_speed_figure_has_the_stored_times_of_both_runs():
    from docs.figures.store import stored
    from docs.pictures import speed

    figure = speed.speed_over_density(128)
    lines = {
        (place, line.get_label()): line.get_ydata() for place, axis in enumerate(figure.axes) for line in axis.lines
    }
    lines = {key: speeds for key, speeds in lines.items() if set(speeds) != {speed.PEAK}}
    assert {label for _, label in lines} == {name for name, *_ in speed.PEERS.values()}
    for place, direction, peer in ((0, "forward", "sparseflash"), (1, "backward", "fa4")):
        dense = speed.timed(stored()["speed/h200"], 128, direction, peer)["dense"]
        assert lines[place, speed.PEERS[peer][0]][-1] == dense.settings["flops"] / dense.value / 1e9


def test_the_picture_of_layers_has_the_stored_ratio_at_each_measured_length():
    from docs.figures.store import stored
    from docs.pictures import selection

    ms = {each.name: each.value for each in stored()[selection.RUN].measurements if each.value}
    figure = selection.speed_over_length()
    for axis, passed in zip(figure.axes, ("forward", "both"), strict=True):
        lines = {line.get_label(): dict(zip(*line.get_data(), strict=True)) for line in axis.lines}
        for layer, (name, *_) in selection.LAYERS.items():
            start = f"selection/{layer}/"
            peer = "sdpa" if (layer, passed) == ("NSA", "both") else "fa4"  # whose backward refuses NSA's heads
            measured = {key.split("/")[2] for key in ms if key.startswith(start) and key.endswith(f"{passed}/{peer}")}
            assert lines[name].keys() == {int(tokens) for tokens in measured}
            assert {8192, 65_536} <= lines[name].keys()
            first = f"{start}8192/{passed}"
            assert lines[name][8192] == ms[f"{first}/{peer}"] / ms[f"{first}/sparseflash"]
