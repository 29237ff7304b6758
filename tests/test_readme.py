import ast
import doctest
import inspect
import re
from importlib import import_module

import pytest

from sparseflash import masks
from tests.docs.pages import PAGES, ROOT, WITH_EXAMPLES, cannot_run_here, examples, inline_code, outputs, without_blocks


def links():
    pattern = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")
    found = [(page, *link) for page in PAGES for link in pattern.findall(without_blocks(page))]
    return [link for link in found if any(link[1:])]


@pytest.mark.parametrize("page", [page for page in WITH_EXAMPLES if examples(page)])
def test_every_example_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    if any("from transformers" in source for source in examples(page)):
        pytest.importorskip("transformers", minversion="5.17")  # needs Python 3.11
    names = {"__name__": "__main__"}
    for number, (source, output) in enumerate(zip(examples(page), outputs(page)), 1):
        code = compile(source, f"{page} example {number}", "exec")
        if cannot_run_here(source):
            continue
        exec(code, names)
        printed = capsys.readouterr().out
        assert missing_from(printed, source) == []
        if output:
            assert printed_as(output, printed), f"{page} example {number} printed:\n{printed}"


@pytest.mark.parametrize(("page", "least"), [("README.md", 1), ("masks/README.md", 2), ("docs/pages/tutorial.md", 5)])
def test_pages_have_examples(page, least):
    assert len([source for source in examples(page) if not cannot_run_here(source)]) >= least


@pytest.mark.parametrize("page", [page for page in PAGES if any(map(cannot_run_here, examples(page)))])
def test_examples_that_cannot_run_here_import_what_there_is(page):
    for source in filter(cannot_run_here, examples(page)):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "sparseflash":
                try:
                    module = import_module(node.module)
                except ModuleNotFoundError as error:  # of a library that the module needs
                    assert not error.name.startswith("sparseflash"), error
                    continue
                assert [each.name for each in node.names if not hasattr(module, each.name)] == []


def test_examples_and_what_they_print_are_told_apart():
    assert missing_from("7 tiles\n", "print(mask)  # 7 tiles: ...\n") == []
    assert missing_from("8 tiles\n", "print(mask)  # 7 tiles: ...\n") == ["7 tiles"]
    assert missing_from("8 tiles\n", "print(mask)  # how many\n") == []
    assert printed_as("7 ... more\nand\n", "7  tiles and more\nand\n") and not printed_as("7\n", "8\n")
    assert cannot_run_here("# Needs a GPU.\n") and not cannot_run_here("needs = 1  # Needs\n")


def missing_from(printed, source):
    shown = [line for line in re.findall(r"^print\(.*\)  # (.*)$", source, re.MULTILINE) if re.search(r"\d", line)]
    parts = [part.strip(" :,") for line in shown for part in line.split("...")]
    return [part for part in parts if part not in printed]


def printed_as(expected, printed):
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(expected, printed, options)


@pytest.mark.parametrize(("page", "path", "heading"), links())
def test_every_link_of_a_readme_leads_somewhere(page, path, heading):
    target = (ROOT / page).parent / path if path else ROOT / page
    assert target.exists()
    if heading:
        titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_readme_names_exists(page):
    """`train.py` is any file of that name."""
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
def test_no_star_inside_of_a_word_is_emphasis(page):
    """Markdown takes two of them for emphasis, as in tiles:16*5,butterfly:8*4."""
    prose = re.sub(r"`[^`]*`|<!--.*?-->", "", without_blocks(page), flags=re.DOTALL)
    assert re.findall(r"\S*\w\*\w\S*", prose) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_call_of_a_pattern_in_a_readme_is_right(page):
    """Names among the arguments stand for anything."""
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
    try:
        tree = ast.parse(source.strip())
    except SyntaxError:
        return []
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [call for call in found if ast.unparse(call.func).removeprefix("masks.") in masks.__all__]
    return [call for call in named if "..." not in map(ast.unparse, call.args)]
