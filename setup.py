"""Makes the description for a package page of README.md; everything else about the package is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

_FILE = r"(?!https?://|#|mailto:)[^)\s]*"  # a path in the repository, which the package page does not have
_PICTURE = re.compile(rf"^!\[[^\]]*\]\({_FILE}\)\n*", re.MULTILINE)
_LINK = re.compile(rf"\[([^\]]*)\]\({_FILE}\)")

if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(
        long_description=_LINK.sub(r"\1", _PICTURE.sub("", readme)),
        long_description_content_type="text/markdown",
    )
