"""The examples of the READMEs run, as they stand and in their order; their links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "masks/README.md", "experiments/patterns/README.md")


def text(page):
    return (ROOT / page).read_text(encoding="utf-8")


def links():
    return [(page, path) for page in PAGES for path in re.findall(r"\]\(([^)#:]+)\)", text(page))]


@pytest.mark.parametrize(("page", "least"), [("README.md", 3), ("masks/README.md", 2)])
def test_every_example_of_a_readme_runs(page, least, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    found = re.findall(r"^```python\n(.*?)^```$", text(page), re.DOTALL | re.MULTILINE)
    assert len(found) >= least
    for number, source in enumerate(found):
        exec(compile(source, f"{page} example {number}", "exec"), names)
    if page == "README.md":
        printed, shown = capsys.readouterr().out, re.findall(r"^print\(.*\)  # (.*)$", text(page), re.MULTILINE)
        parts = {part.strip(" :,") for line in shown if re.search(r"\d", line) for part in line.split("...")} - {""}
        assert len(parts) == 4 and {part for part in parts if part not in printed} == set()


@pytest.mark.parametrize(("page", "path"), links())
def test_every_link_of_a_readme_leads_somewhere(page, path):
    assert (ROOT / page).parent.joinpath(path).exists()
