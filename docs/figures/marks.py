"""Marks in pages and docstrings: parses their requests, and fills them in."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from docs.figures.stale import changes
from docs.figures.store import RESULTS, ROOT, FigureError, Stored, figure, stored
from docs.figures.table import rendered
from docs.figures.tables import FILES, TABLES, TEXTS
from docs.figures.tried import table as tried

MARK = re.compile(r"<!-- (figure|table|text|runs?)(?:: ([^>]*?))? -->(.*?)<!-- /\1 -->", re.DOTALL)
_KINDS = "(?:figure|table|text|runs?)"
MARK_TEXT = rf"<!-- {_KINDS}\b[^>]* -->(?:(?!<!-- /?{_KINDS}).)*<!-- /{_KINDS} -->"
OPENED = re.compile(rf"<!-- /?{_KINDS}\b[^>]*>")
CHANGED = "; the kernels have changed since"
DAGGER, DAGGER_NOTE = " †", "† The kernels have changed since this run."  # the same in a list of runs
_CODE = r"^(?P<indent> *)```.*?^(?P=indent)```$|``[^\n]+?``|`[^`\n]+`"
_PIECE = re.compile(rf"(?P<mark>(?s:{MARK_TEXT}))|(?P<code>(?s:{_CODE}))", re.MULTILINE)


def pages() -> list[Path]:
    """The files in which figures may stand: the pages, and Python files for their docstrings."""
    written = [ROOT / "README.md", ROOT / "masks" / "README.md", *sorted((ROOT / "docs" / "pages").rglob("*.md"))]
    written += [path for path in sorted((ROOT / "experiments").glob("*/README.md")) if path.parent != RESULTS]
    written += [RESULTS / "compile" / "README.md", *sorted((RESULTS / "tried").glob("*.md"))]
    python = (path for folder in ("sparseflash", "masks", "experiments") for path in (ROOT / folder).rglob("*.py"))
    return written + sorted(path for path in python if "<!-- figure:" in path.read_text(encoding="utf-8"))


@dataclass
class Page:
    """A page with its figures filled in, and what is wrong with it."""

    path: Path
    before: str
    after: str
    shown: dict[str, set[str]] = field(default_factory=dict)  # what it showed for each request, before
    cited: dict[str, Stored] = field(default_factory=dict)  # the runs of its figures, by BENCHMARK/FILE
    named: set[str] = field(default_factory=set)  # those whose device and commit the page names
    errors: list[str] = field(default_factory=list)
    unmarked: list[str] = field(default_factory=list)  # runs older than their kernels that the page does not mark

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix() if self.path.is_relative_to(ROOT) else self.path.name

    def is_current(self) -> bool:
        return self.before == self.after


def pieces_of(text: str) -> Iterator[tuple[str, str]]:
    """A page in pieces: ("text", ...), ("mark", ...) with its two comments, ("code", ...), where marks are examples."""
    at = 0
    for found in _PIECE.finditer(text):
        yield "text", text[at : found.start()]
        yield str(found.lastgroup), found[0]
        at = found.end()
    yield "text", text[at:]


def filled(path: Path, results: Path = RESULTS) -> Page:
    """The page with every mark filled in. A mark with an error keeps its text."""
    text = path.read_text(encoding="utf-8")
    page = Page(path, text, text)
    is_page = path.suffix == ".md"
    pieces = list(pieces_of(text)) if is_page else [("mark", each) for each in re.split(f"((?s:{MARK_TEXT}))", text)]
    for last in (False, True):
        pieces = [(kind, _written(page, piece, last, results) if kind == "mark" else piece) for kind, piece in pieces]
    page.after = "".join(piece for _, piece in pieces)
    left = [each for kind, piece in pieces if kind == "text" for each in OPENED.findall(piece)]
    page.errors += [f"{each} must have its other half, and no mark may stand in another" for each in left]
    if is_page:
        page.errors += _misplaced(page, pieces)
    return page


def _misplaced(page: Page, pieces: list[tuple[str, str]]) -> list[str]:
    found, line = [], ""
    for kind, piece in pieces:
        if kind == "mark" and not line.strip() and not piece.startswith(("<!-- table", "<!-- runs")):
            found.append(
                f"{piece.partition('-->')[0]}--> must not stand first in a line: Markdown reads such a line as HTML"
            )
        line = (line + piece).rpartition("\n")[2]
    return found + [
        f"a figure of {key} needs its run on the page: "
        f"add <!-- runs --><!-- /runs --> or <!-- run: {key} --><!-- /run -->"
        for key in sorted(page.cited.keys() - page.named)
    ]


def _written(page: Page, mark: str, last: bool, results: Path) -> str:
    found = MARK.fullmatch(mark)
    if found is None or (found[1] == "runs") != last:
        return mark
    kind, request, old = found[1], found[2] or "", found[3]
    try:
        new = _fill(page, kind, request, old, results)
    except ValueError as error:
        page.errors.append(str(error))
        return mark
    return f"<!-- {kind}: {request} -->{new}<!-- /{kind} -->" if request else f"<!-- {kind} -->{new}<!-- /{kind} -->"


def _fill(page: Page, kind: str, request: str, old: str, results: Path) -> str:
    if kind == "figure":
        found = figure(request, results)
        page.cited[found.file.key] = found.file
        page.shown.setdefault(f"{request} of {found.file.key}", set()).add(old)
        return found.text
    if kind == "text":
        return _defined(TEXTS, request)()
    if kind == "table" and (request in FILES or request.startswith("tried/")):
        return f"\n{FILES[request]() if request in FILES else tried(request.removeprefix('tried/'), results)}\n"
    if kind == "table":
        table = rendered(_defined(TABLES, request), results)
        page.cited |= table.files
        page.named |= table.files.keys()
        files = table.files.values()
        if "<!-- runs -->" in page.before:
            measured = f"Run: {', '.join(_link(file, page) for file in files)}."
        else:
            measured = f"Measured on {'; and on '.join(caption(file, page, old) for file in files)}."
        note = " ".join(filter(None, [measured, table.note]))
        return f"\n{table.text}\n" + (f"\n{note}\n" if note else "")
    if kind == "run":
        if request not in stored(results):
            raise FigureError(f"run: {request} must be a file of the store, as BENCHMARK/FILE; it is not")
        page.named.add(request)
        return caption(stored(results)[request], page, old)
    page.named |= page.cited.keys()
    machines: dict[str, list[Stored]] = {}
    for _, file in sorted(page.cited.items()):
        machines.setdefault(_machine(file), []).append(file)
    lines = []
    for machine, runs in machines.items():
        if len(runs) == 1:
            lines.append(f"- {machine}, {_dated(runs[0], page, old, DAGGER)}")
        else:
            lines += [f"- {machine}:", *(f"    - {_dated(file, page, old, DAGGER)}" for file in runs)]
    if any(line.endswith(DAGGER) for line in lines):
        lines += ["", DAGGER_NOTE]
    return "\n" + "\n".join(lines) + "\n"


def _defined(table: dict, name: str):  # type: ignore[no-untyped-def,type-arg]
    if name not in table:
        raise FigureError(f"{name} must be one of those that docs/figures/tables.py defines: {', '.join(table)}")
    return table[name]


def caption(file: Stored, page: Page, old: str) -> str:
    """The run of a file in a line: device, versions, commit, date, the file, and whether its kernels have changed."""
    return f"{_machine(file)}, {_dated(file, page, old)}"


def _machine(file: Stored) -> str:
    versions = [f"{name} {file.run.versions[name]}" for name in ("torch", "triton") if file.run.versions.get(name)]
    return ", ".join([file.run.device, *versions])


def _dated(file: Stored, page: Page, old: str, mark: str = CHANGED) -> str:
    run = file.run
    text = f"commit {run.commit}, {run.date.partition(' ')[0].partition('T')[0]} ({_link(file, page)})"
    count = changes(file)
    # Without git's history the mark stays as it is.
    was_marked = f"{text}{mark}" in old
    if count and not was_marked:
        page.unmarked.append(
            f"{file.key} ({run.commit}) is older than {count} changes of its kernels, which {page.name}"
        )
    is_marked = bool(count) if count is not None else was_marked
    return text + mark * is_marked


def _link(file: Stored, page: Page) -> str:
    return f"[{file.key}]({posixpath.relpath(file.path.as_posix(), page.path.parent.as_posix())})"


def contradictions(checked: list[Page]) -> list[str]:
    """Requests with different figures in two places, before the pages were filled in."""
    shown: dict[str, dict[str, set[str]]] = {}
    for page in checked:
        for request, texts in page.shown.items():
            for text in texts:
                shown.setdefault(request, {}).setdefault(text, set()).add(page.name)
    said = []
    for request, texts in shown.items():
        if len(texts) > 1:
            parts = (f"{text or 'nothing'} in {' and '.join(sorted(places))}" for text, places in texts.items())
            said.append(f"{request}: {', '.join(parts)}")
    return said
