import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from experiments.lra import weights
from experiments.lra.data.batches import PADDING
from experiments.lra.data.listops.generator import Settings, generate
from experiments.lra.denoise import frequency_baseline, hidden_for_scoring, hidden_for_training, hide
from experiments.lra.model.build import build_model, build_optimizer
from experiments.lra.table import accuracy
from experiments.lra.tasks import TASKS, load
from experiments.lra.train import Run
from experiments.training import tensor_files
from experiments.training.fingerprint import sha256
from experiments.training.run_folder import check_replaceable
from sparseflash import masks
from tests.experiments.lra.models import SMALL, fake_batch, training_step

DENOISE = replace(SMALL, objective="denoise", hidden=0.25)
SHORT = replace(
    DENOISE, mask="local", window=16, batch=8, max_tokens=40, steps=4, warmup=1, eval_every=2, checkpoint_every=3,
    log_every=2, average=0.5, device="cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return load("listops", generate(Settings(10, 60, 64, 16, 24), tmp_path_factory.mktemp("data"), workers=1))


@pytest.fixture(scope="module")
def pretrained(data, tmp_path_factory):
    run = Run(SHORT, data, tmp_path_factory.mktemp("pretrained") / "run")
    return run, run.train()


@given(st.floats(0.001, 0.999), st.integers(0, 2**32), st.sampled_from([0, 1]))
def test_the_share_of_the_own_live_tokens_is_hidden_and_nothing_else(share, number, first):
    batch = fake_batch()
    hidden = hide(batch, share, np.random.default_rng(number), first)
    changed = (hidden.ids != batch.ids).flatten()
    own = int(batch.lengths.sum()) - first * len(batch.lengths)
    assert changed.sum() == len(hidden.asked) == max(1, round(share * own))
    assert changed.nonzero().squeeze(1).tolist() == hidden.asked.tolist()
    assert (hidden.ids.flatten()[hidden.asked] == PADDING).all()
    assert torch.equal(hidden.labels, batch.ids.flatten()[hidden.asked]) and (hidden.labels != PADDING).all()
    assert (hidden.asked % batch.ids.shape[1] >= first).all()
    assert torch.equal(fake_batch().ids, batch.ids)


def asked_of(batches):
    return [batch.asked.tolist() for batch in batches]


def test_every_step_and_process_hides_other_tokens_and_a_resumed_run_the_same():
    shape = SHORT.shape
    four = [fake_batch()] * 4
    whole = asked_of(hidden_for_training(four, shape, 0.5, 0, 0, 0))
    assert len({tuple(asked) for asked in whole}) == 4
    assert asked_of(hidden_for_training(four[:2], shape, 0.5, 0, 2, 0)) == whole[2:]
    others = [asked_of(hidden_for_training(four, shape, 0.5, seed, 0, rank)) for seed, rank in ((1, 0), (0, 1))]
    scored = asked_of(hidden_for_scoring(four, shape, 0.5, range(4)))
    assert scored == asked_of(hidden_for_scoring(four, shape, 0.5, range(4)))
    assert all(each not in whole for other in (*others, scored) for each in other)


def test_hidden_tokens_are_learned_from_those_around_them():
    batch = fake_batch()
    batch.ids[batch.ids != PADDING] = 5
    batch.ids[3:][batch.ids[3:] != PADDING] = 9
    model = build_model(DENOISE, TASKS["listops"], masks.local(48, window=16, block=16))
    optimizer = build_optimizer(DENOISE, model)
    losses = []
    for step in range(10):
        shown = hide(batch, 0.25, np.random.default_rng(step))
        losses.append(training_step(model, optimizer, shown, DENOISE, 0.01)[0].item())
    assert np.mean(losses[-3:]) < 0.3 < np.log(2) < losses[0]


def test_a_run_says_how_well_it_names_tokens(pretrained, data):
    run, metrics = pretrained
    shown = sum(min(40, int(n)) for n in (data.test.ends - data.test.begins).flatten())
    assert abs(metrics["test_examples"] - 0.25 * shown) <= 3
    assert [rule["rule"] for rule in metrics["baselines"]] == ["most frequent token"]
    assert run.folder / "model.safetensors" in run.folder.iterdir()
    assert accuracy.collect(run.folder) == []


def test_the_frequency_baseline_is_that_of_the_tokens(data):
    rule = frequency_baseline(data, SHORT.shape)
    train, test = (
        np.concatenate([split.sequence(i)[:40] for i in range(len(split))]) + split.shift
        for split in (data.train, data.test)
    )
    frequent = np.bincount(train).argmax()
    assert rule.accuracy == pytest.approx((test == frequent).mean())
    chances = {token: (np.sum(train == token) + 1) / (len(train) + data.task.vocabulary) for token in set(test)}
    assert rule.loss == pytest.approx(-np.mean([np.log(chances[token]) for token in test]))


def test_a_classifier_begins_with_the_averaged_encoder_and_a_new_head(pretrained, data, tmp_path):
    run, _ = pretrained
    path = run.folder / "model.safetensors"
    config = replace(SHORT, objective="classify", initial=str(path), steps=2)
    began = Run(config, data, tmp_path / "run")
    written, own = load_file(path), began.model.state_dict()
    encoder = [name for name in own if not name.startswith("head.")]
    assert all(torch.equal(own[name], written[name]) for name in encoder)
    assert any(not torch.equal(run.model.state_dict()[name], written[name]) for name in encoder)  # not the last step's
    metrics = began.train()
    assert metrics["initial"]["objective"] == "denoise" and metrics["initial"]["steps"] == 4
    (row,) = accuracy.collect(tmp_path)
    assert row.initial == "denoise 4"


def test_a_resumed_run_needs_the_first_weights_no_more(pretrained, data, tmp_path):
    path = tmp_path / "initial.safetensors"
    path.write_bytes((pretrained[0].folder / "model.safetensors").read_bytes())
    config = replace(SHORT, objective="classify", initial=str(path))
    whole = Run(config, data, tmp_path / "whole").train()
    first = Run(config, data, tmp_path / "run")
    assert first.train(pause=lambda step: step == 2) is None
    path.unlink()
    metrics = Run(config, data, tmp_path / "run", resume=True).train()
    assert metrics["test_loss"] == whole["test_loss"] and metrics["initial"] == whole["initial"]


@pytest.fixture
def in_parts(pretrained, monkeypatch, tmp_path):
    run, _ = pretrained
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, limit in ((whole, tensor_files.PART_BYTES), (parts, 12_000)):
        folder.mkdir()
        monkeypatch.setattr(tensor_files, "PART_BYTES", limit)
        weights.save(folder / weights.FILE, run.model, run.config, {"steps": 4}, [run.fingerprint], 0.5)
    return run, whole, parts


def test_a_large_model_is_written_in_parts_and_read_by_any_of_its_names(in_parts):
    run, whole, parts = in_parts
    names = sorted(path.name for path in parts.iterdir())
    count = len(names)
    assert count > 2
    assert names == [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    tensors = load_file(whole / weights.FILE)
    largest = max(tensor.nbytes for tensor in tensors.values())
    assert all((parts / name).stat().st_size <= max(12_000, largest + 2_000) for name in names)
    for path in (whole, parts, parts / weights.FILE, parts / names[0], parts / names[-1]):
        found, about = tensor_files.read(path, weights.KIND)
        assert about["cost"] == {"steps": 4}
        assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
    hashed = hashlib.sha256(b"".join((parts / name).read_bytes() for name in names)).hexdigest()
    of_parts, of_whole = (weights.begin_from(run.model, path, run.config, run.fingerprint) for path in (parts, whole))
    assert of_parts["sha256"] == hashed
    assert of_whole["sha256"] == sha256(whole / weights.FILE)


def test_a_model_replaces_another_of_its_name_whole_or_in_parts(in_parts):
    run, whole, parts = in_parts
    weights.save(whole / weights.FILE, run.model, run.config, {}, [run.fingerprint], 0.5)
    assert sorted(each.name for each in whole.iterdir()) == sorted(each.name for each in parts.iterdir())
    tensor_files.write(parts / weights.FILE, run.model, {"kind": weights.KIND})
    assert [each.name for each in parts.iterdir()] == [weights.FILE]
    tensor_files.remove(whole / weights.FILE)
    assert list(whole.iterdir()) == []


def test_parts_that_are_not_those_of_one_model_are_refused(in_parts):
    run, _, parts = in_parts
    first, *_, last = tensor_files.files(parts)
    with pytest.raises(FileExistsError, match="holds a run"):
        check_replaceable(parts, overwrite=False, initial=None)
    kept = last.read_bytes()
    last.unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {last.name}$"):
        tensor_files.read(parts, weights.KIND)
    weights.save(parts / weights.FILE, run.model, run.config, {"steps": 5}, [run.fingerprint], 0.5)
    last.write_bytes(kept)
    with pytest.raises(ValueError, match=f"{last.name} must be a part of the same model as the first part"):
        tensor_files.read(parts, weights.KIND)
    first.rename(parts / "model-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"must hold the parts of one model.safetensors; got some of \[2, \d+\] parts"):
        tensor_files.files(first)


def test_other_files_are_refused(pretrained, tmp_path):
    run, _ = pretrained
    path = tmp_path / "model.safetensors"

    def begin(path, **changes):
        config = replace(SHORT, objective="classify", **changes)
        weights.begin_from(build_model(config, TASKS["listops"], run.mask), path, config, run.fingerprint)

    with pytest.raises(FileNotFoundError, match="there is no file"):
        begin(path)
    path.write_bytes(b"no weights")
    with pytest.raises(ValueError, match=r"must be a file of an experiments\.lra model; got ValueError: "):
        begin(path)
    save_file({"x": torch.zeros(1)}, path, metadata={"about": json.dumps({"kind": "another"})})
    with pytest.raises(ValueError, match="got 'another'"):
        begin(path)
    with pytest.raises(ValueError, match=r"depth, width, heads.* is \[\d+, 64\] here and \[\d+, 32\] there"):
        begin(run.folder, width=64)
    with pytest.raises(ValueError, match=r"layers\.2.* there"):
        begin(run.folder, depth=3)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"heads": 4}, "heads is 2 there, and 4 here"),
        ({"positions": "rotary"}, {"positions": "sinusoidal"}, "positions is rotary there, and sinusoidal here"),
        ({"positions": "rotary"}, {"positions": "rotary", "heads": 4, "head_dim": 8}, "heads is 2 there"),
        (
            {"positions": "sinusoidal", "pool": "mean"},
            {"positions": "sinusoidal", "pool": "cls"},
            "place of the first token is 0 there, and 1 here",
        ),
    ],
)
def test_weights_that_would_mean_something_else_are_refused(data, tmp_path, before, after, message):
    first = Run(replace(SHORT, steps=1, **before), data, tmp_path / "first")
    first.train()
    config = replace(SHORT, objective="classify", initial=str(first.folder), **after)
    with pytest.raises(ValueError, match=f"must hold an encoder like this run's: {message}"):
        Run(config, data, tmp_path / "second")


def test_rotary_positions_do_not_see_where_the_first_token_stands(data, tmp_path):
    first = Run(replace(SHORT, steps=1, positions="rotary", pool="mean"), data, tmp_path / "first")
    first.train()
    config = replace(SHORT, objective="classify", initial=str(first.folder), positions="rotary", pool="cls", steps=1)
    assert Run(config, data, tmp_path / "second").train()["initial"]["seen"] == [first.fingerprint]


def test_what_all_runs_before_have_cost_is_told(pretrained, data, tmp_path):
    other = load("listops", generate(Settings(10, 60, 32, 8, 24, seed=1), tmp_path, workers=1))
    first, metrics = pretrained
    between = Run(replace(SHORT, objective="classify", initial=str(first.folder), keep="best"), other, tmp_path / "a")
    of_between = between.train()
    last = Run(replace(between.config, initial=str(between.folder), steps=1), data, tmp_path / "b").train()
    initial = last["initial"]
    (before,) = initial["before"]
    assert (before["objective"], before["steps"], before["seconds"]) == ("denoise", 4, metrics["training_seconds"])
    assert (initial["objective"], initial["seconds"]) == ("classify", of_between["training_seconds"])
    assert [each["hash"] for each in initial["seen"]] == [first.fingerprint["hash"], between.fingerprint["hash"]]
    rows = {row.folder: row.initial for row in accuracy.collect(tmp_path)}
    assert rows == {"a": "denoise 4", "b": f"denoise 4, classify {of_between['tested_step']}"}
    told = accuracy.described(initial, "else")
    assert told == f"denoise 4 (ListOps), classify {of_between['tested_step']} (ListOps)"


def test_weights_that_have_seen_another_split_are_refused(pretrained, data, tmp_path):
    """Two sets of one seed begin with the same expressions."""
    smaller = load("listops", generate(Settings(10, 60, 32, 8, 24), tmp_path, workers=1))
    trained_on = {data.train.sequence(i).tobytes() for i in range(len(data.train))}
    assert any(smaller.test.sequence(i).tobytes() in trained_on for i in range(len(smaller.test)))
    config = replace(SHORT, objective="classify", initial=str(pretrained[0].folder))
    with pytest.raises(ValueError, match=r"another split of the same examples .*generated, seed 0"):
        Run(config, smaller, tmp_path / "run")
    longer = load("listops", generate(Settings(10, 100, 64, 16, 24), tmp_path, workers=1))
    with pytest.raises(ValueError, match="another split of the same examples"):
        Run(config, longer, tmp_path / "run")
    other = load("listops", generate(Settings(10, 60, 32, 8, 24, seed=1), tmp_path, workers=1))
    between = Run(config, other, tmp_path / "between")
    between.train()
    with pytest.raises(ValueError, match=r"between was trained on another split of the same examples"):
        Run(replace(config, initial=str(between.folder)), smaller, tmp_path / "run")


def test_settings_are_checked():
    for changed, message in (({"objective": "guess"}, "objective must be one of"), ({"hidden": 1.0}, "hidden must be")):
        with pytest.raises(ValueError, match=message):
            replace(SMALL, **changed)
