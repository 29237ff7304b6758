"""Hooks of mkdocs: pages, pictures, notebooks and stored results from elsewhere, links, headings of the reference.

Links of pages are relative to the file, so that they also work where the repository is browsed. On the site, a link to
a page leads to that page; pictures, results and their pages are copied; a notebook is run and becomes a page with its
outputs. A link to any other file leads to the repository if `repo_url` is set; if not, it becomes the file's path.
"""

import posixpath
import re
from functools import cache, reduce
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from docs import notebooks
from experiments.benchmarks.patterns import catalogue

ROOT = Path(__file__).resolve().parents[1]
PAGES = "docs/pages"
# Pages of the site that lie elsewhere: where on the site, and where in the repository.
ELSEWHERE = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "index.md": "README.md",
    "patterns/catalogue.md": "masks/README.md",
}
PICTURES = "pictures"  # the folder of the site into which pictures from elsewhere are copied
COPIES = "repository"  # the folder of the site into which stored results and the pages about them are copied
COPIED = ("experiments/",)  # where they lie
DATA = (".csv", ".json", ".jsonl")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
CODE = re.compile(r"(`[^`\n]*`)")
UNIT = re.compile(r"(?<=\d) (?=(?:%|[mu]?s|[KMG]i?B|TFLOP/s)(?!\w))")  # stays with its number
REFERENCE = re.compile(r"^::: ([\w.]+)$(?:\n    options: \{(.*)\}$)?", re.MULTILINE)
HEADING = re.compile(r"^## ", re.MULTILINE)
PATTERN = re.compile(r"^::: (sparseflash\.masks\.\w+\.(\w+))$", re.MULTILINE)
THUMBNAILS = "<!-- pictures -->"  # where a family of patterns has its pictures
FIGURE = re.compile(r"<!-- /?(?:figure|table|text|runs?)\b[^>]*-->")
FENCED = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)


def source_of(uri: str) -> str:
    """Where a page or a file of the site lies in the repository."""
    if uri.startswith(f"{COPIES}/"):
        return uri.removeprefix(f"{COPIES}/")
    return ELSEWHERE.get(uri, f"{PAGES}/{uri}")


def copied(source: str) -> str | None:
    """The file that a link to `source` leads to, if it is copied to the site: a page for a folder."""
    if not f"{source}/".startswith(COPIED):
        return None
    if (ROOT / source).is_dir():
        source = f"{source}/README.md"
    return source if source.endswith((".md", *DATA)) and (ROOT / source).is_file() else None


def target_of(source: str, uri: str, repository: str | None) -> str | None:
    """Where a link to the repository's file `source` leads on the page `uri`, or None: nowhere."""
    on_site = {path: page for page, path in ELSEWHERE.items()}.get(source)
    if source.startswith(f"{PAGES}/"):
        on_site = source.removeprefix(f"{PAGES}/").replace(".ipynb", ".md")
    elif source.endswith((".png", ".svg")):
        on_site = f"{PICTURES}/{source}"
    elif not repository and on_site is None and (copy := copied(source)):
        on_site = f"{COPIES}/{copy}"
    if on_site is not None:
        return posixpath.relpath(on_site, posixpath.dirname(uri) or ".")
    return None if not repository else f"{repository.rstrip('/')}/blob/main/{source}"


def rewritten(markdown: str, uri: str, repository: str | None = None) -> str:
    """The text of the page `uri` with links for the site, and as Python-Markdown reads it.

    In a table GitHub needs `|` escaped in code, too, where Python-Markdown would show the backslash.
    """
    folder = posixpath.dirname(source_of(uri))

    def link(found: re.Match[str]) -> str:
        picture, text, path, heading = found[1], found[2], found[3], found[4] or ""
        if not path or "://" in path:
            return found[0]
        source = posixpath.normpath(posixpath.join(folder, path))
        target = target_of(source, uri, repository)
        if target is not None:
            return f"{picture}[{text}]({target}{heading})"
        code, name = f"`{source}`{{.path}}", text.strip("`").rstrip("/")
        if name == path or any(f"/{each}".endswith(f"/{name}") for each in (source, source.removesuffix("/README.md"))):
            return code
        before = found.string[: found.start()].rpartition("\n\n")[2]
        return f"{text}: {code}" if before.count("(") > before.count(")") else f"{text} ({code})"

    def rest(text: str) -> str:
        pieces = CODE.split(LINK.sub(link, FIGURE.sub("", text)))
        return "".join(p.replace(r"\|", "|") if p[:1] == "`" else UNIT.sub("\N{NO-BREAK SPACE}", p) for p in pieces)

    parts, at = [], 0
    for block in FENCED.finditer(markdown):
        parts += [rest(markdown[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*parts, rest(markdown[at:])])


def located(path: str) -> Any:
    """The object defined as `path`, in a module or in one of its classes."""
    module, names = path, []
    while True:
        try:  # the whole path first: a module that its package has not imported yet is no attribute of it
            return reduce(getattr, names, import_module(module))
        except ImportError:
            if "." not in module:
                raise
        module, _, name = module.rpartition(".")
        names.insert(0, name)


def public_name(path: str) -> str:
    """The shortest name that imports the object defined as `path`, through its parent packages."""
    holder, _, name = path.rpartition(".")
    if isinstance(located(holder), type):
        return f"{public_name(holder)}.{name}"
    module = import_module(holder)
    defined, parts = getattr(module, name), holder.split(".")
    packages = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return next(f"{each}.{name}" for each in packages if getattr(import_module(each), name, None) is defined)


def with_public_names(markdown: str) -> str:
    """A page of the reference with the public names as headings, one level below the families if it has any."""
    level = 3 if HEADING.search(markdown) else 2

    def directive(found: re.Match[str]) -> str:
        more = f", {found[2]}" if found[2] else ""
        return f"::: {found[1]}\n    options: {{heading: {public_name(found[1])}, heading_level: {level}{more}}}"

    return REFERENCE.sub(directive, markdown)


def with_thumbnails(markdown: str) -> str:
    """A page of the reference with a picture of each pattern of a family, which leads to its function."""
    before, *families = markdown.split(THUMBNAILS)
    drawn = patterns()

    def line(family: str) -> str:
        found = [each for each in PATTERN.findall(HEADING.split(family)[0]) if each[1] in drawn]
        return " ".join(f"[![{name}](images/{name}.png){{.pattern}}](#{path})" for path, name in found)

    return before + "".join(line(family) + family for family in families)


@cache
def patterns() -> dict[str, bytes]:
    """A picture of each pattern, as a PNG, by the name of its function."""
    from matplotlib.figure import Figure

    pictures = {}
    for each in catalogue.PATTERNS:
        if not each.is_variant:
            mask, figure = each.build(1024, 32), Figure(figsize=(2, 2))
            axes = figure.add_axes((0, 0, 1, 1))
            mask.plot(axes, heads=min(1, mask.shape[1] - 1), elements=True, legend=False)
            axes.set_axis_off()
            figure.savefig(file := BytesIO(), format="png", dpi=128)
            pictures[each.name] = file.getvalue()
    return pictures


def pictures_in(markdown: str, uri: str) -> set[str]:
    """The pictures from elsewhere in the repository that a page shows or leads to."""
    folder = posixpath.dirname(source_of(uri))
    found = {posixpath.normpath(posixpath.join(folder, link[3])) for link in LINK.finditer(markdown)}
    return {path for path in found if path.endswith((".png", ".svg")) and not path.startswith(f"{PAGES}/")}


def copies_in(markdown: str, uri: str) -> set[str]:
    """The stored results, and the pages about them, that a page leads to."""
    folder = posixpath.dirname(source_of(uri))
    links = (posixpath.normpath(posixpath.join(folder, link[3])) for link in LINK.finditer(markdown) if link[3])
    return {path for link in links if (path := copied(link))}


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Adds the pages, pictures and stored results that lie elsewhere, and the notebooks with their outputs."""
    for uri, path in ELSEWHERE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    texts = {}
    left = [uri for uri in files.src_uris if uri.endswith(".md")]
    while left:  # a copied page may lead to others
        uri = left.pop()
        texts[uri] = (ROOT / source_of(uri)).read_text(encoding="utf-8")
        if config.repo_url:
            continue
        for path in copies_in(texts[uri], uri):
            name = f"{COPIES}/{path}"
            if files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
                left += [name] if name.endswith(".md") else []
    for path in sorted({path for uri, text in texts.items() for path in pictures_in(text, uri)}):
        files.append(File.generated(config, f"{PICTURES}/{path}", abs_src_path=str(ROOT / path)))
    for name, picture in patterns().items():
        files.append(File.generated(config, f"reference/images/{name}.png", content=picture))
    for path in sorted((ROOT / PAGES).rglob("*.ipynb")):
        uri = path.relative_to(ROOT / PAGES).with_suffix("").as_posix()
        text, pictures = notebooks.page(path)
        files.append(File.generated(config, f"{uri}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, posixpath.join(posixpath.dirname(uri), name), content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Copied pages are not searched."""
    if page.file.src_uri.startswith(f"{COPIES}/"):
        page.meta["search"] = {"exclude": True}
    return with_public_names(with_thumbnails(rewritten(markdown, page.file.src_uri, config.repo_url)))
