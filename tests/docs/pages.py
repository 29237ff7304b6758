"""The Markdown pages of the repository, and the code in them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "masks/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "pages").rglob("*.md")),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "experiments").rglob("*.md")),
)
EXAMPLE = re.compile(r"^```python\n(.*?)^```\n(?:\n*^```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)


# Results are records: the code in them is not an example.
WITH_EXAMPLES = [page for page in PAGES if not page.startswith("experiments/results/")]


def text(page):
    return (ROOT / page).read_text(encoding="utf-8")


def examples(page):
    return [source for source, _ in EXAMPLE.findall(text(page))]


def outputs(page):
    return [output for _, output in EXAMPLE.findall(text(page))]


def cannot_run_here(source):
    """Whether an example says in its first line what it needs that a test lacks."""
    return source.startswith("# Needs ")


def without_blocks(page):
    return re.sub(r"^( *)```.*?^\1```$", "", text(page), flags=re.DOTALL | re.MULTILINE)


def inline_code(page):
    return [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", without_blocks(page))]
