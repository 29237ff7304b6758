import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from experiments.lra import graph_steps
from experiments.lra.config import Config
from experiments.lra.data.batches import Shape, collate
from experiments.lra.data.examples import Examples
from experiments.lra.denoise import hide
from experiments.lra.graph_steps import padded_to_longest, shape_of, steps_of, with_most_labels
from experiments.lra.losses import forward
from experiments.lra.model.build import build_model, build_optimizer, mask_of
from experiments.lra.scoring import score
from experiments.lra.tasks import TASKS
from experiments.training.cuda_graphs import GraphSteps, move_gradients
from experiments.training.steps import NO_LABEL, Steps
from tests.watched.waiting import waiting_raises

CPU = torch.device("cpu")
CONFIG = Config(
    task="listops", mask="butterfly", block=16, depth=2, width=32, heads=2, mlp=32, max_tokens=63, dropout=0.0,
    precision="fp32", lr=1e-3, recorded=True,
)  # fmt: skip
SHAPE = Shape(16, 63, cls=TASKS["listops"].cls)


def batch_of(*lengths, seed=0):
    random = np.random.default_rng([seed, *lengths])
    edges = np.concatenate([[0], np.cumsum(lengths)])
    symbols = random.integers(1, 16, edges[-1], dtype=np.uint8)
    labels = random.integers(0, 10, len(lengths), dtype=np.uint8)
    rows = np.arange(len(lengths))
    return collate(Examples(symbols, edges[:-1, None], edges[1:, None], labels, shift=0), rows, SHAPE)


BATCHES = (
    batch_of(20, 40), batch_of(60, 5), batch_of(9, 3), batch_of(31, 22), batch_of(47, 47),
    batch_of(38, 2, seed=1), batch_of(49, 55, seed=1),
)  # fmt: skip


def steps_and_model(device, config=CONFIG, *, recorded=False):
    model = build_model(config, TASKS[config.task], mask_of(config).to(device))
    return steps_of(model, build_optimizer(config, model), replace(config, recorded=recorded), device), model


def test_batches_of_a_shape_share_a_graph():
    shapes = [shape_of(batch) for batch in BATCHES]
    assert [shape.ids[1] for shape in shapes] == [48, 64, 16, 32, 48, 48, 64]
    assert len(set(shapes)) == 5


def test_places_that_are_not_asked_for_are_in_no_loss():
    config = replace(CONFIG, objective="denoise", hidden=0.3)
    _, model = steps_and_model(CPU, config)
    batch = hide(BATCHES[0], 0.3, np.random.default_rng(0), first=1)
    filled = with_most_labels(batch, config)
    assert len(filled.labels) == len(filled.asked) == round(0.3 * 96) > len(batch.asked)
    assert (filled.labels == NO_LABEL).sum() == len(filled.asked) - len(batch.asked)
    losses = [F.cross_entropy(forward(model, each, config), each.labels) for each in (batch, filled)]
    assert torch.allclose(*losses, rtol=1e-6)
    assert with_most_labels(BATCHES[0], CONFIG) is BATCHES[0]


def test_only_one_process_on_a_gpu_has_graphs():
    _, model = steps_and_model(CPU)
    optimizer, gpu = build_optimizer(CONFIG, model), torch.device("cuda")
    assert type(steps_of(model, optimizer, CONFIG, gpu, pool=(0, 0))) is GraphSteps
    assert type(steps_of(model, optimizer, CONFIG, gpu, model, pool=(0, 0))) is GraphSteps
    assert type(steps_of(model, optimizer, CONFIG, CPU)) is Steps
    assert type(steps_of(model, optimizer, replace(CONFIG, recorded=False), gpu)) is Steps
    shared = torch.nn.Sequential(model)
    steps = steps_of(model, optimizer, CONFIG, gpu, shared)
    assert type(steps) is Steps
    assert steps.data_parallel is shared


def test_the_longest_batch_is_the_same_batch():
    _, model = steps_and_model(CPU)
    model.eval()
    for batch in BATCHES:
        longest = padded_to_longest(batch, CONFIG.shape)
        assert longest.ids.shape == (2, 64)
        assert torch.allclose(forward(model, longest, CONFIG), forward(model, batch, CONFIG), atol=1e-6)
    assert padded_to_longest(BATCHES[1], CONFIG.shape) is BATCHES[1]


def test_static_tensors_are_copies():
    batch = hide(BATCHES[0], 0.3, np.random.default_rng(0), first=1)
    own = batch.copy_on(CPU)
    for name in ("ids", "lengths", "labels", "asked"):
        assert torch.equal(getattr(own, name), getattr(batch, name))
        assert getattr(own, name).data_ptr() != getattr(batch, name).data_ptr()
    assert own.places is None


def test_gradients_move_to_where_all_graphs_leave_them():
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    model = torch.nn.ParameterList([first, second])
    (3 * second).sum().backward()
    places = [torch.zeros(2), torch.zeros(3)]
    move_gradients(model, places)
    assert first.grad is None
    assert second.grad is places[1]
    assert places[1].tolist() == [3.0, 3.0, 3.0]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("attention", ["sparseflash", "sdpa", "standard"])
def test_recorded_steps_are_those_of_the_host(attention, compiled):
    config = replace(CONFIG, attention=attention)
    device = torch.device("cuda")
    plain, first = steps_and_model(device, config)
    steps, second = steps_and_model(device, replace(config, compiled=compiled), recorded=True)
    assert all(torch.equal(*pair) for pair in zip(first.parameters(), second.parameters()))
    for batch in BATCHES * 4:
        expected, found = plain(batch, 1e-3), steps(batch, 1e-3)
        assert float(found.loss) == pytest.approx(float(expected.loss), abs=2e-3)
        assert abs(int(found.right) - int(expected.right)) <= 1
    assert len(steps.captured) == 5
    for one, other in zip(first.parameters(), second.parameters()):
        assert torch.allclose(one, other, atol=5e-3)


@pytest.mark.gpu
def test_recorded_steps_denoise():
    config = replace(CONFIG, objective="denoise", hidden=0.3)
    device = torch.device("cuda")
    plain, _ = steps_and_model(device, config)
    steps, _ = steps_and_model(device, config, recorded=True)
    random = np.random.default_rng(0)
    for batch in BATCHES * 3:
        hidden = hide(batch, 0.3, random, first=1)
        assert float(steps(hidden, 1e-3).loss) == pytest.approx(float(plain(hidden, 1e-3).loss), abs=5e-3)


@pytest.mark.gpu
def test_rarer_shapes_have_no_graph(monkeypatch):
    monkeypatch.setattr(graph_steps, "MOST_SHAPES", 2)
    device = torch.device("cuda")
    plain, first = steps_and_model(device)
    steps, second = steps_and_model(device, recorded=True)
    for batch in BATCHES * 2:
        assert float(steps(batch, 1e-3).loss) == pytest.approx(float(plain(batch, 1e-3).loss), abs=2e-3)
    assert len(steps.captured) == 2
    for one, other in zip(first.parameters(), second.parameters()):
        assert torch.allclose(one, other, atol=5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dropped", [{"dropout": 0.3}, {"attention_dropout": 0.2}, {"dropout": 0.3, "compiled": True}])
def test_dropout_is_another_at_every_replay_and_the_same_from_the_same_state(dropped):
    config = replace(CONFIG, **dropped)
    steps, model = steps_and_model(torch.device("cuda"), config, recorded=True)
    steps.prepare(BATCHES[0])
    begin, state = copy.deepcopy(model.state_dict()), torch.cuda.get_rng_state()
    losses = [float(steps(BATCHES[0], 0.0).loss) for _ in range(4)]
    assert len(set(losses)) == 4
    model.load_state_dict(begin)
    torch.cuda.set_rng_state(state)
    assert [float(steps(BATCHES[0], 0.0).loss) for _ in range(4)] == losses


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mask", ["dense", "butterfly", "local"])
def test_what_is_trained_is_what_is_tested(mask, compiled):
    config = replace(
        CONFIG, mask=mask, block=128, max_tokens=2000, depth=3, width=256, heads=4, mlp=256, precision="bf16",
        positions="nested", pool="mean+max", qk_norm=True, compiled=compiled,
    )  # fmt: skip
    device = torch.device("cuda")
    steps, model = steps_and_model(device, config, recorded=True)
    random = np.random.default_rng(0)
    lengths = np.sort(random.integers(500, 2000, 64))
    edges = np.concatenate([[0], np.cumsum(lengths)])
    symbols = random.integers(1, 16, edges[-1], dtype=np.uint8)
    labels = (symbols[edges[:-1]] - 1) % 10
    examples = Examples(symbols, edges[:-1, None], edges[1:, None], labels.astype(np.uint8), shift=0)
    tight = [collate(examples, np.arange(first, first + 8), config.shape) for first in range(0, 64, 8)]
    wide = [collate(examples, np.arange(first, 64, 8), config.shape) for first in range(8)]
    assert all(batch.ids.shape[1] > 1700 for batch in wide)
    for _ in range(25):
        for batch in tight:
            steps(batch, 3e-4)
    told = [float(steps(batch, 0.0).loss) for batch in tight]
    tested = [score(model, [batch], config, device).loss for batch in tight]
    assert told == pytest.approx(tested, abs=0.03)
    assert np.mean(told) < 2.0
    assert score(model, wide, config, device).loss == pytest.approx(np.mean(tested), abs=0.01)


@pytest.mark.gpu
def test_no_recorded_step_waits_for_the_gpu():
    steps, _ = steps_and_model(torch.device("cuda"), replace(CONFIG, precision="bf16"), recorded=True)
    for batch in BATCHES:
        steps(batch, 1e-3)
    with waiting_raises():
        for batch in BATCHES:
            steps(batch, 1e-3)
