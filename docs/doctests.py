"""An extension of griffe for mkdocstrings: puts doctests into fenced code, because in Markdown `>>>` begins a
quotation.
"""

import re
from typing import Any

from griffe import Extension, Object

OPTION = re.compile(r" *# doctest: .*$", re.MULTILINE)
DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1(?! *$).+)*", re.MULTILINE)


def fenced(docstring: str) -> str:
    """The docstring with its doctests in blocks of code; a doctest ends at an empty line."""
    return DOCTEST.sub(lambda found: f"{found[1]}```pycon\n{OPTION.sub('', found[0])}\n{found[1]}```", docstring)


class Doctests(Extension):
    """Rewrites every docstring that is loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
