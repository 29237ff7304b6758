import importlib

import pytest
from typer.testing import CliRunner

CONTENTS = {
    "not text": b"\xff\xfe\x00\x90", "no JSON": b"{", "other JSON": b'{"a": 1}\n', "a list": b"[1, 2]",
    "nothing": b"null", "empty": b"", "deep": b"[" * 100_000, "deep objects": b'{"kind":' * 100_000,
    "long number": b"[" + b"9" * 10_000 + b"]",
}  # fmt: skip

# Command, needed file, and the file of the folder it reads.
COMMANDS = {
    "pathfinder parameters": ("experiments.pathfinder.cli", "generate --parameters {}/a.json --out {}/out", "a.json"),
    "pathfinder picture": ("experiments.pathfinder.cli", "picture --real {}/a.png --out {}/b.png", "a.png"),
    "thin": ("experiments.training.__main__", "thin {}/log.jsonl", "log.jsonl"),
    "lra runs": ("experiments.lra.cli", "record {}/run", "run/metrics.json"),
    "lra series": ("experiments.lra.cli", "train --resume --out {}", "seeds.json"),
    "lra resume": ("experiments.lra.cli", "train --resume --out {}", "config.json"),
    "lm resume": ("experiments.lm.cli", "train --resume --out {}", "config.json"),
    "pathx resume": ("experiments.pathx.cli", "train --resume --out {}", "config.json"),
    "pathx curriculum": ("experiments.pathx.cli", "train --curriculum {}/a.json --out {}/out", "a.json"),
    "pathx weights": ("experiments.pathx.cli", "evaluate {}", "model.json"),
    "lm tokens": ("experiments.lm.cli", "train --data {} --steps 1 --device cpu --out {}/out", "about.json"),
    "lm show": ("experiments.lm.cli", "show {}", "log.jsonl"),
    "lm bench": ("experiments.lm.cli", "show {} --out {}/a.png", "bench.json"),
    "exactness": ("experiments.benchmarks.exactness.__main__", "{}/records.jsonl", "records.jsonl"),
    "patterns": ("experiments.benchmarks.patterns.__main__", "table --only causal --results {}/rows.json", "rows.json"),
}


@pytest.mark.parametrize("contents", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_of_something_else_is_named_in_one_line(name, contents, tmp_path):
    module, words, file = COMMANDS[name]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(contents + b"\n")
    if name == "pathx weights":
        (tmp_path / "model.safetensors").write_bytes(b"")
    app = importlib.import_module(module).app
    result = CliRunner().invoke(app, words.format(*[tmp_path] * words.count("{}")).split())
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("Error: ") and file.rpartition("/")[2] in result.stderr


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    app = importlib.import_module("experiments.pathfinder.cli").app
    for path, said in ((tmp_path / "a.json", "there is no such file"), (tmp_path, "it is a folder")):
        result = CliRunner().invoke(app, ["generate", "--parameters", str(path), "--out", str(tmp_path / "out")])
        assert result.exit_code == 2
        assert f"{path} must be a JSON file of all parameters of a generator; {said}" in result.stderr
