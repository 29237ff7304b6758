import re
import shlex
from importlib import import_module

import pytest
import typer.main

from tests.docs.pages import PAGES, text

MOVED = ("speed", "io", "tune", "blocks", "compile", "exactness", "patterns")
RUN = re.compile(r"-m (experiments[.\w]*\w)((?:\"[^\"`\n]*\"|'[^'`\n]*'|[^`\n;|])*)")


def joined(page):
    found = re.sub(r"\\\n\s*", " ", text(page))
    for name, value in re.findall(r'^\s*(\w+)="(.*)"$', found, re.MULTILINE):
        found = found.replace(f"${name}", value)
    return found


def commands(page):
    found = joined(page)
    yield from ((program, rest) for program, rest in RUN.findall(found))
    yield from (("sparseflash", rest) for rest in re.findall(r"(?:^|`)sparseflash ([a-z][^`\n]*)", found, re.MULTILINE))
    head = None
    for line in found.splitlines():
        cell = line.split("|")[1] if line.startswith("|") else ""
        if "..." in cell and (run := RUN.search(cell)):
            head = run
        elif not cell:
            head = None
        elif head and (code := re.match(r" `([^`]+)`", cell)):
            yield head[1], head[2].replace("...", code[1])


def program_of(name):
    first, _, rest = name.partition(".")
    if rest.split(".")[0] in MOVED:
        name = f"{first}.benchmarks.{rest}"
    for module in ("sparseflash.cli.app",) if name == "sparseflash" else (f"{name}.__main__", f"{name}.cli", name):
        try:
            app = getattr(import_module(module), "app", None)
        except ModuleNotFoundError as error:
            if not module.startswith(error.name):
                raise
            continue
        if app is not None:
            return typer.main.get_command(app)
    return None


def wrong_with(name, rest):
    if name == "experiments.benchmarks":
        word, _, rest = rest.strip().partition(" ")
        return None if word in ("show", "NAME") else wrong_with(f"{name}.{word}", rest)
    command = program_of(name)
    if command is None:
        return f"there is no {name} to run"
    words = iter(shlex.split(rest, comments=True))
    for word in words:
        if word.startswith("--"):
            option, _, value = word.partition("=")
            found = [each for each in command.params if option in (*each.opts, *each.secondary_opts)]
            if not found and option != "--help":
                return f"{name} has no option {option}"
            if found and not found[0].is_flag and not value:
                next(words, None)
        elif getattr(command, "commands", None) and word != "...":
            if word not in command.commands:
                return f"{name} has no command {word}"
            command, name = command.commands[word], f"{name} {word}"
    return None


@pytest.mark.parametrize("page", [page for page in PAGES if list(commands(page))])
def test_every_command_of_a_readme_exists_with_its_options(page):
    assert [complaint for program, rest in commands(page) if (complaint := wrong_with(program, rest))] == []


def test_what_is_wrong_with_a_command_is_found():
    assert wrong_with("experiments.lra", "train --preset lra") is None
    assert wrong_with("experiments.lra", "trian --preset lra") == "experiments.lra has no command trian"
    assert wrong_with("experiments.lra", "train --prest lra") == "experiments.lra train has no option --prest"
    assert wrong_with("experiments.lara", "train") == "there is no experiments.lara to run"
    assert wrong_with("experiments.benchmarks", " show a.jsonl") is None
    assert wrong_with("experiments.benchmarks", " iou table") == "there is no experiments.benchmarks.iou to run"
    assert wrong_with("experiments.benchmarks.io", "table --dim 64 --group memory") == (
        "experiments.benchmarks.io table has no option --group"
    )
    assert wrong_with("sparseflash", "show 'causal(64)' --casual") == "sparseflash show has no option --casual"
