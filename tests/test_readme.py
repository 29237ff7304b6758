"""The examples of the READMEs run, as they stand and in their order; links, paths and calls in them are right."""

import ast
import inspect
import re

import pytest

from pages import PAGES, ROOT, examples, inline_code, text
from sparseflash import masks


def links():
    found = [(page, *link) for page in PAGES for link in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text(page))]
    return [link for link in found if any(link[1:])]


@pytest.mark.parametrize(("page", "least"), [("README.md", 3), ("masks/README.md", 2)])
def test_every_example_of_a_readme_runs(page, least, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)  # as torchrun does, for one process
    names = {}
    found = examples(page)
    assert len(found) >= least
    for number, source in enumerate(found):
        exec(compile(source, f"{page} example {number}", "exec"), names)
    if page == "README.md":
        printed, shown = capsys.readouterr().out, re.findall(r"^print\(.*\)  # (.*)$", text(page), re.MULTILINE)
        parts = {part.strip(" :,") for line in shown if re.search(r"\d", line) for part in line.split("...")} - {""}
        assert len(parts) == 4 and {part for part in parts if part not in printed} == set()


@pytest.mark.parametrize(("page", "path", "heading"), links())
def test_every_link_of_a_readme_leads_somewhere(page, path, heading):
    target = (ROOT / page).parent / path if path else ROOT / page
    assert target.exists()
    if heading:
        titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_readme_names_exists(page):
    """By its path from the root, from the page's folder or from its name on: `train.py` is any file of that name."""
    folders = [ROOT / name for name in ("sparseflash", "masks", "experiments", "tests")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md")]
    named = {code for code in inline_code(page) if re.fullmatch(r"(?:\.\./)*[\w/-]+\.(?:py|md)", code)}
    missing = {
        code
        for code in named
        if not any((folder / code).exists() for folder in (ROOT, (ROOT / page).parent))
        and not any(str(file).endswith(f"/{code}") for file in files)
    }
    assert missing == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_call_of_a_pattern_in_a_readme_is_right(page):
    """Examples run in another test; here are the calls in their comments and between backticks, `masks.local(...)` or
    `local(...)`. Names among the arguments stand for anything, so those calls are held to the signature alone."""
    comments = [line.partition("#")[2] for example in examples(page) for line in example.splitlines()]
    found = [call for source in [*comments, *inline_code(page)] for call in calls_of_patterns(source)]
    assert {ast.unparse(call): error for call in found if (error := error_of(call))} == {}


def test_a_wrong_call_of_a_pattern_is_found():
    for source in ("masks.local(1_048_576, 512)", "local(n, n, 512)", "masks.local(n, widnow=3)"):
        (call,) = calls_of_patterns(source)
        assert error_of(call)
    (call,) = calls_of_patterns("masks.local(q.shape[2], window=window)")
    assert error_of(call) is None
    assert calls_of_patterns("local(...)") == calls_of_patterns("attention(q, k, v)") == []


def error_of(call):
    """What a call of a pattern raises, or None."""
    function = getattr(masks, ast.unparse(call.func).rpartition(".")[2])
    try:
        positional = [ast.literal_eval(argument) for argument in call.args]
        named = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    except ValueError:  # not all of them are literals
        function = inspect.signature(function).bind
        positional, named = call.args, {each.arg: each.value for each in call.keywords}
    try:
        function(*positional, **named)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def calls_of_patterns(source):
    """The calls in a piece of Python; of what is no Python, none."""
    try:
        tree = ast.parse(source.strip())
    except SyntaxError:
        return []
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [call for call in found if ast.unparse(call.func).removeprefix("masks.") in masks.__all__]
    return [call for call in named if "..." not in map(ast.unparse, call.args)]
