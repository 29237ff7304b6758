import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from experiments import measurements
from experiments.selection import cli
from experiments.selection.cli import app
from experiments.selection.layers import LAYERS, layer_of
from experiments.selection.model import RecallModel
from experiments.selection.recall import Recall
from experiments.selection.report import measurements_of, table
from experiments.selection.sizes import Sizes
from experiments.selection.train import PRESETS, Settings, train
from sparseflash import masks

SIZES = Sizes(128, width=32, dim=16, tile=16, chosen=2)
CPU = torch.device("cpu")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_a_way_may_be_a_pattern_of_the_library_or_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text("def rule(q, k):\n    return (q - k).abs() <= 5\n")
    own = layer_of(f"{tmp_path}/mine.py:rule", SIZES).of_all
    assert own == masks.local(128, left=5, right=0, block=16)  # and nothing after the query
    assert layer_of("local(n, window=9, causal=True)", SIZES).of_all == masks.local(
        128, window=9, causal=True, block=16
    )
    found = train(f"{tmp_path}/mine.py:rule", PRESETS["test"], CPU)
    assert found["way"].endswith("mine.py:rule") and found["tokens_per_second"] > 0


def test_a_wrong_pattern_is_refused_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "train", lambda *_: pytest.fail("it was trained"))
    for way, words in (
        ("windows", "way must be one of dense, window, "),
        ("no.py:rule", "there is no file no.py"),
        ("lokal(n)", "no pattern is called lokal"),
    ):
        done = CliRunner().invoke(app, ["--preset", "test", "--way", "dense", "--way", way, "--out", str(tmp_path)])
        assert done.exit_code != 0 and words in done.output


@pytest.mark.parametrize("spread", [1, 3])
def test_every_query_asks_for_a_pair_of_one_of_a_few_blocks(spread):
    task = Recall(128, 32, 200, spread=spread)
    batch = task.batch(5, generator())
    pairs = task.tokens - task.queries
    assert torch.equal(batch.keys[:, pairs:], batch.keys.gather(1, batch.where))
    assert torch.equal(batch.answers, batch.values.gather(1, batch.where))
    assert (batch.values[:, pairs:] == task.values).all() and (batch.where < pairs).all()
    for keys, where in zip(batch.keys, batch.where):
        assert len(keys[:pairs].unique()) == pairs
        for asked in where.view(-1, task.block):
            assert len((asked // task.block).unique()) <= spread


@pytest.mark.parametrize(
    "arguments",
    [{"tokens": 120, "queries": 32}, {"tokens": 128, "queries": 20}, {"tokens": 48, "queries": 16, "spread": 3}],
)
def test_sizes_that_do_not_fit_are_refused(arguments):
    with pytest.raises(ValueError, match=r"tokens and queries must be multiples of the block, with . blocks of pairs"):
        Recall(**arguments)
    with pytest.raises(ValueError, match=r"keys must be at least as many as pairs, 96; got 50"):
        Recall(128, 32, 50)


@pytest.mark.parametrize("way", [way for way in LAYERS if way not in ("dense", "window", "strided")])
def test_the_last_queries_read_as_many_keys_as_they_may_choose(way):
    task = Recall(128, 32, 128)
    model = RecallModel(task, SIZES, way).eval()
    _, mask = model(task.batch(2, generator()))
    counts = mask.to_dense()[:, :, -task.queries :].sum(-1)
    at_most = SIZES.chosen * SIZES.block
    if way == "QSA":  # and the tokens after the last span
        ahead = torch.arange(96, 128) + 1
        assert torch.equal(counts, (at_most + ahead % 4).expand_as(counts))
    elif way in ("DSA", "VSA"):
        assert (counts == at_most).all()
    else:  # the query's own block has only the keys up to the query
        own = torch.arange(96, 128) % SIZES.block + 1
        assert torch.equal(counts, (at_most - SIZES.block + own).expand_as(counts))
    assert "choice" not in vars(model.attention) and model.train()(task.batch(2, generator()))[1] is None


@pytest.mark.parametrize("way", LAYERS)
def test_every_parameter_learns(way):
    torch.manual_seed(0)
    task = Recall(128, 32, 128)
    model = RecallModel(task, SIZES, way)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    logits, _ = model(task.batch(2, generator()))
    own = getattr(model.attention, "loss", None)
    (logits.square().sum() + (0.0 if own is None else own)).backward()
    assert {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()} == set()


def test_what_was_read_is_told_by_the_mask():
    task = Recall(128, 32, 128)
    batch = task.batch(2, generator())
    model = RecallModel(task, SIZES, "window").eval()
    _, mask = model(batch)
    asked_at = torch.arange(96, 128)
    want = (asked_at - batch.where < 32) & (batch.where <= asked_at)
    assert torch.equal(model.found(mask, batch)[:, 0], want)
    assert RecallModel(task, SIZES, "dense").found(masks.causal(128), batch).all()


def test_dense_attention_learns_the_task():
    settings = Settings(Recall(48, 16, 32, values=4, spread=1), Sizes(48, width=32, heads=1, kv_heads=1), 120, 32)
    found = train("dense", replace(settings, measure_every=120), CPU)
    assert found["accuracy"] > 0.9 and found["found"] == 1.0


def test_queries_that_begin_like_keys_find_them_soon():
    settings = Settings(Recall(256, 32, 256), Sizes(256), 30, 8, measure_every=30)
    accuracy = {alike: train("dense", replace(settings, alike=alike), CPU)["accuracy"] for alike in (True, False)}
    assert accuracy[True] > 0.8 and accuracy[False] < 0.3


@pytest.mark.parametrize("way", ["MoBA", "NSA", "VSA"])
def test_what_queries_share_hides_the_right_blocks_from_means(way):
    task, sizes = Recall(1024, 128, 1024), Sizes(1024, chosen=8)
    found = {}
    for marked in (True, False):
        torch.manual_seed(0)
        model = RecallModel(task, sizes, way, alike=True, marked=marked).eval()  # not trained
        batch = task.batch(2, generator())
        with torch.no_grad():
            of_last = model.found(model(batch)[1], batch)[:, :, -task.block :]
        found[marked] = of_last.float().mean().item()
    assert found[True] < 0.05 and found[False] > 0.3


def test_settings_are_changed_by_the_command():
    settings = PRESETS["cpu"]
    assert settings.changed() == settings
    other = settings.changed(block=32, marked=False, steps=7)
    assert (other.sizes.block, other.sizes.chosen, other.marked, other.steps) == (32, 2, False, 7)
    with pytest.raises(ValueError, match="block must divide the 64 keys of a query; got 48"):
        settings.changed(block=48)
    result = train("MoBA", PRESETS["test"].changed(block=32, marked=False), CPU)
    names = {each.name for each in measurements_of(result)}
    assert "recall-unmarked/128/right-answers/moba-blocks-of-32" in names


def test_ways_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=r"way must be one of dense, window, .*; got 'best'"):
        RecallModel(Recall(), SIZES, "best")


def test_the_command_writes_a_table_numbers_and_a_picture(tmp_path, monkeypatch):
    record = tmp_path / "cpu.jsonl"
    found = CliRunner().invoke(app, ["--preset", "test", "--out", str(tmp_path), "--record", str(record)])
    assert found.exit_code == 0, found.output
    right = [each for each in measurements.read(record)[1] if "/right-answers/" in each.name]
    assert len(right) == len(LAYERS) and all(each.settings["run_seeds"] == [0] for each in right)
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [each["way"] for each in results] == list(LAYERS)
    assert (tmp_path / "table.md").read_text() == table(results) + "\n"
    assert (tmp_path / "recall.png").stat().st_size > 5000
    assert found.output.startswith("| way | accuracy |")
    assert CliRunner().invoke(app, ["--preset", "huge", "--out", str(tmp_path)]).exit_code == 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    found = CliRunner().invoke(app, ["--preset", "gpu", "--out", str(tmp_path)])
    assert found.exit_code == 2 and "PyTorch sees 0 GPUs here" in found.output
    assert all(settings.task.tokens == settings.sizes.tokens for settings in PRESETS.values())


def test_what_was_measured_before_a_stop_is_kept(tmp_path, monkeypatch):
    real = cli.train

    def stopped(way, *rest):
        if way == "MoBA":
            raise KeyboardInterrupt
        return real(way, *rest)

    monkeypatch.setattr(cli, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        cli.compare("test", ["NSA", "MoBA"], tmp_path, "cpu", 0)
    kept = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [each["way"] for each in kept] == ["NSA"] and (tmp_path / "table.md").exists()
