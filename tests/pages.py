"""The pages of the repository: what is written in Markdown, and the code in it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
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
    """The Python examples, in order."""
    return [source for source, _ in EXAMPLE.findall(text(page))]


def outputs(page):
    """The text block that directly follows each Python example, which is what it prints; empty where there is none."""
    return [output for _, output in EXAMPLE.findall(text(page))]


def cannot_run_here(source):
    """Whether an example says in its first line that it needs a GPU, a model or whatever else a test has not."""
    return source.startswith("# Needs ")


def without_blocks(page):
    """The text without blocks of code."""
    return re.sub(r"^( *)```.*?^\1```$", "", text(page), flags=re.DOTALL | re.MULTILINE)


def inline_code(page):
    """What stands between single backticks outside of blocks of code."""
    return [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", without_blocks(page))]
