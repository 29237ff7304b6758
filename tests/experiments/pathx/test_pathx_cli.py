from typer.testing import CliRunner

from experiments.pathx.cli import app


def test_the_command_line_helps_and_says_what_is_wrong(tmp_path):
    runner = CliRunner()
    for command in ("train", "evaluate", "testset", "analyse", "table", "plot"):
        assert runner.invoke(app, [command, "--help"]).exit_code == 0
    for arguments, text in (
        (["train", "--resume"], "--resume needs --out"),
        (["train", "--resume", "--out", str(tmp_path), "--minutes", "3"], "leave out --preset, --curriculum"),
        (["train", "--curriculum", "nothing"], "must be one of smoke"),
        (["train", "--preset", "nothing"], "the preset must be one of cpu; got 'nothing'"),
        (["evaluate", str(tmp_path / "none")], "there is no file"),
        (["table", str(tmp_path / "none")], "Invalid value for 'folders'"),
    ):
        result = runner.invoke(app, arguments)
        assert result.exit_code == 2
        assert text in result.output
