from typer.testing import CliRunner

from experiments.lra import cli
from experiments.lra.config import DEFAULTS
from tests.experiments.lra.runs import TINY

WINDOW = {"window": TINY.window}
OPTIONS = {name: value for name, value in vars(TINY).items() if name not in WINDOW and value != DEFAULTS[name]}


def call(*words, **options):
    words = list(map(str, words))
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return CliRunner().invoke(cli.app, words)
