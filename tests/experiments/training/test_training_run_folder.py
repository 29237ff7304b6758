from dataclasses import dataclass

import pytest

from experiments.training.run_folder import check_replaceable, discard, holds_run, resumed, saved_settings, settings_as

OF_A_RUN = (
    "config.json", "log.jsonl", "metrics.json", "model.json", "model.safetensors", "tests/other.json",
    "checkpoint-00000005/part.safetensors",
)  # fmt: skip


def fill(folder, names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    return folder


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_run_is_discarded_whole_and_nothing_else(tmp_path):
    fill(tmp_path, [*OF_A_RUN, "notes.md", "analysis/analysis.md"])
    discard(tmp_path)
    assert files(tmp_path) == ["analysis/analysis.md", "notes.md"]
    assert not holds_run(tmp_path)


def test_a_folder_without_a_run_keeps_what_has_the_names_of_a_runs_files(tmp_path):
    """With --out . the project's tests must not be taken for a run's."""
    names = ["tests/test_one.py", "metrics.json", "model.json"]
    fill(tmp_path, names)
    check_replaceable(tmp_path, overwrite=False, initial=None)
    discard(tmp_path)
    assert files(tmp_path) == sorted(names)


@pytest.mark.parametrize("name", ["config.json", "log.jsonl", "model.safetensors", "checkpoint-00000005/part"])
def test_what_is_left_of_a_run_is_not_overwritten_unasked(name, tmp_path):
    fill(tmp_path, [name])
    with pytest.raises(FileExistsError, match="holds a run; go on with it by --resume, replace it by --overwrite"):
        check_replaceable(tmp_path, overwrite=False, initial=None)


def test_a_resumed_run_keeps_its_settings_but_for_those_that_are_free(tmp_path):
    @dataclass(frozen=True)
    class Settings:
        log_every: int = 10
        seed: int = 0

    assert resumed(Settings(), {"log_every": 5, "seed": 0}, {"log_every"}) == Settings(log_every=5)
    with pytest.raises(ValueError, match=r"a resumed run must keep its settings: --log-every was 10, got 5"):
        resumed(Settings(), {"log_every": 5}, {"seed"})
    with pytest.raises(FileNotFoundError, match="there is no run to resume in"):
        saved_settings(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "it is no JSON object"),
        ('{"data": {}}', "it has no config"),
        ('{"config": 5}', "got TypeError: 'int' object is not subscriptable"),
        ('{"config": {}}', "got KeyError: 'seed'"),
    ],
)
def test_settings_of_another_form_are_named(text, words, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"config.json must be the settings of a run; {words}"):
        settings_as(path, lambda saved: saved["config"]["seed"])
