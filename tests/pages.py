"""The pages of the repository: what is written in Markdown, and the code in it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "masks/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "experiments").rglob("*.md")),
)


def text(page):
    return (ROOT / page).read_text(encoding="utf-8")


def examples(page):
    """The Python examples, in order."""
    return re.findall(r"^```python\n(.*?)^```$", text(page), re.DOTALL | re.MULTILINE)


def inline_code(page):
    """What stands between single backticks outside of blocks of code."""
    outside = re.sub(r"^( *)```.*?^\1```$", "", text(page), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", outside)]
