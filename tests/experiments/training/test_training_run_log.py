from itertools import pairwise

import pytest
from typer.testing import CliRunner

from experiments.training.__main__ import app
from experiments.training.run_log import LAST, MOST_TRAINING, RunLog, read, thinned, write


def test_a_log_drops_what_a_resumed_run_will_write_again(tmp_path):
    path = tmp_path / "log.jsonl"
    log = RunLog(path, None)
    for number in (1, 2, 3):
        log.write({"kind": "train", "step": number})
    with open(path, "a") as file:
        file.write('{"kind": "tra')
    again = RunLog(path, 2)
    assert [record["step"] for record in again.records] == [1, 2]
    again.write({"kind": "val", "step": 2})
    assert read(path) == [{"kind": "train", "step": 1}, {"kind": "train", "step": 2}, {"kind": "val", "step": 2}]


def log(training, validates_every=100):
    records = []
    for step in range(1, training + 1):
        records.append({"kind": "train", "step": step, "accuracy": step / training})
        if step % validates_every == 0:
            records.append({"kind": "val", "step": step})
    return [*records, {"kind": "test", "step": training}]


@pytest.mark.parametrize("training", [0, 1, 19, 20, 21, 199, 200, 201, 5000])
def test_a_thinned_log_has_its_ends_all_validations_and_evenly_spaced_training(training):
    records = log(training)
    found = thinned(records)
    assert [each for each in found if each["kind"] != "train"] == [each for each in records if each["kind"] != "train"]
    kept = [each["step"] for each in found if each["kind"] == "train"]
    assert len(kept) == min(training, MOST_TRAINING)
    assert kept[-LAST:] == list(range(max(1, training - LAST + 1), training + 1))
    if training > MOST_TRAINING:
        gaps = {after - before for before, after in pairwise(kept[:-LAST])}
        assert kept[0] == 1 and max(gaps) - min(gaps) <= 1
    assert [each["step"] for each in found] == sorted(each["step"] for each in found)
    assert thinned(found) == found


def test_a_log_is_thinned_to_more_than_its_last_records():
    assert len(thinned(log(100, 1000), 30)) == 31
    with pytest.raises(ValueError, match="most must be more than the 20 last training records, which are kept; got 20"):
        thinned(log(100), 20)


def test_the_command_thins_all_logs_below_a_folder(tmp_path):
    long, short = (tmp_path / name / "log.jsonl" for name in ("long", "short"))
    for path, training in ((long, 1000), (short, 50)):
        path.parent.mkdir()
        write(path, log(training))
    before = short.read_bytes()
    result = CliRunner().invoke(app, ["thin", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert f"{long}: 211 of 1,011 lines" in result.output and str(short) not in result.output
    assert read(long) == thinned(log(1000)) and short.read_bytes() == before
    result = CliRunner().invoke(app, ["thin", str(long), "--most", "5"])
    assert result.exit_code == 2 and "most must be more than the 20 last" in result.output
