"""The examples of the READMEs run, as they stand and in their order; their links and commands lead somewhere."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "masks/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "experiments").rglob("*.md")),
)


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


# Pages of results give commands as they were run, at older commits.
@pytest.mark.parametrize("page", [page for page in PAGES if "results/" not in page])
def test_every_module_that_a_readme_runs_exists(page):
    modules = set(re.findall(r"-m (experiments[.\w]*\w)", text(page)))
    programs = {name: [name, f"{name}.__main__"] for name in modules}
    assert [name for name, either in programs.items() if not any(map(exists, either))] == []


def exists(module):
    """Whether there is a module of this name, which is not a package."""
    try:
        found = find_spec(module)
    except ModuleNotFoundError:
        return False
    return found is not None and found.submodule_search_locations is None
