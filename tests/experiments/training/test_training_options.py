from dataclasses import dataclass, fields
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from experiments.lra import cli as lra
from experiments.pathx import cli as pathx
from experiments.training.options import settings_as_options
from experiments.training.settings import RunSettings, changed, check_one_of, setting


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    width: int = changed(RunSettings, "width", default=64)
    mask: str = setting("dense", "Which scores are live.")


def call(*words, names=()):
    got = {}
    app = typer.Typer()

    @app.command()
    @settings_as_options(Settings, *names)
    def train(first: Annotated[int, typer.Option()] = 1, *, chosen, last: Annotated[int, typer.Option()] = 2):
        got.update(chosen=chosen, others=(first, last))

    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    return result.exit_code, got, result.output


def test_a_command_gets_the_settings_that_were_chosen_and_no_others():
    assert call("--last", "5") == (0, {"chosen": {}, "others": (1, 5)}, "")
    code, got, _ = call("--width", "64", "--mask=local", "--no-recorded", "--clip", "0.5")
    assert (code, got["chosen"]) == (0, {"width": 64, "mask": "local", "recorded": False, "clip": 0.5})
    code, got, _ = call("--mask=local", names=("mask",))
    assert (code, got["chosen"]) == (0, {"mask": "local"})
    assert call("--width", "64", names=("mask",))[0] == 2
    assert call("--width", "wide")[0] == 2


def test_the_help_has_every_setting_once_and_those_of_the_trainer_first():
    output = " ".join(call("--help")[2].split())
    options = [f"--{each.name.replace('_', '-')} " for each in fields(Settings)]
    assert all(output.count(f" {option}") == 1 for option in options)
    assert output.index("--first") < output.index("--mask") < output.index("--block") < output.index("--last")
    assert "[default: (64)]" in output and "[default: (width / heads)]" in output


@pytest.mark.parametrize("module", [lra, pathx], ids=["lra", "pathx"])
def test_both_trainers_have_the_shared_options(module):
    command = typer.main.get_command(module.app).commands["train"]
    options = {name for parameter in command.params for name in parameter.opts}
    shared = {f"--{each.name.replace('_', '-')}" for each in fields(RunSettings)}
    assert shared | {"--out", "--resume", "--overwrite", "--pause-after"} <= options


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"width": 0}, "width must be at least 1; got 0"),
        ({"clip": -0.5}, "clip must be at least 0; got -0.5"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1; got 1.0"),
        ({"precision": "fp16"}, "precision must be fp32 or bf16; got 'fp16'"),
    ],
)
def test_shared_settings_are_checked(chosen, message):
    with pytest.raises(ValueError, match=message):
        Settings(**chosen)


def test_a_value_must_be_one_of_those_allowed():
    check_one_of("mask", "local", ("dense", "local"))
    with pytest.raises(ValueError, match="mask must be one of dense, local; got 'none'"):
        check_one_of("mask", "none", ("dense", "local"))
