import math

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments.lra import exactness
from experiments.lra.config import Config
from experiments.lra.data.listops.tokens import encode
from experiments.lra.model.build import build_model, build_optimizer
from experiments.lra.model.classifier import POOLS, Classifier, pool
from experiments.lra.model.positions import OF_BRACKETS, POSITIONS, Nesting, sinusoids
from experiments.lra.presets import settings_of
from experiments.lra.scoring import score
from experiments.lra.tasks import TASKS
from experiments.training import lr_schedule
from experiments.training.layers.rotary import RotaryPositions
from sparseflash import BlockMask, masks
from sparseflash.nn.rotary import rotate
from tests.experiments.lra.models import CPU, SMALL, fake_batch, model_with, training_step


@pytest.mark.parametrize("pool", POOLS)
def test_steps_on_one_batch_lower_its_loss(pool):
    batch = fake_batch()
    model = model_with(masks.butterfly(48, block=16), pool=pool)
    optimizer = build_optimizer(SMALL, model)
    losses = [training_step(model, optimizer, batch, SMALL, SMALL.lr)[0].item() for _ in range(12)]
    assert losses[-1] < losses[0] - 0.3


def test_weights_are_dropped_in_training_only():
    batch = fake_batch()
    model = model_with(masks.local(48, window=8, block=16), attention_dropout=0.5)
    assert not torch.equal(model.train()(batch.ids, batch.lengths), model(batch.ids, batch.lengths))
    assert torch.equal(model.eval()(batch.ids, batch.lengths), model(batch.ids, batch.lengths))


def test_step_returns_loss_and_right_answers():
    batch = fake_batch()
    model = model_with(masks.local(48, window=8, block=16))
    before = score(model, [batch], SMALL, CPU)
    loss, auxiliary, right = training_step(model, build_optimizer(SMALL, model), batch, SMALL, lr=0.0)
    after = score(model, [batch, batch], SMALL, CPU)
    assert loss.item() == pytest.approx(before.loss, rel=1e-5)
    assert right.item() == round(before.accuracy * 6)
    assert auxiliary.item() == 0.0
    assert (after.loss, after.accuracy) == pytest.approx((before.loss, before.accuracy))
    assert after.examples == 12


def test_a_length_first_met_in_a_validation_can_be_trained_on():
    batch = fake_batch()
    model = model_with(masks.butterfly(96, block=16))
    found = score(model, [batch], SMALL, CPU)
    outcome = training_step(model, build_optimizer(SMALL, model), batch, SMALL, lr=0.0)
    assert outcome.loss.item() == pytest.approx(found.loss, rel=1e-5)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_padding_is_not_seen(pool, positions):
    batch = fake_batch()
    task = "image" if positions == "rotary2d" else "listops"
    model = model_with(BlockMask.dense(48, block=16), task=task, pool=pool, positions=positions).eval()
    other = batch.ids.clone()
    other[torch.arange(48) >= batch.lengths[:, None]] = 7
    assert torch.equal(model(batch.ids, batch.lengths), model(other, batch.lengths))


def test_a_shorter_batch_sees_the_same_as_a_padded_one():
    batch = fake_batch()
    model = model_with(masks.butterfly(96, block=16), qk_norm=True, positions="rotary").eval()
    wide = torch.nn.functional.pad(batch.ids, (0, 48))
    torch.testing.assert_close(model(wide, batch.lengths), model(batch.ids, batch.lengths))


@pytest.mark.parametrize("positions", [each for each in POSITIONS if each not in OF_BRACKETS])
def test_an_image_without_its_background_is_the_image_with_black_pixels_masked(positions):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(1, 256, (2, 1024), generator=generator) * (torch.rand(2, 1024, generator=generator) < 0.05)
    from experiments.lra.data.batches import collate
    from experiments.lra.data.examples import Examples

    begins = np.array([[0], [1024]])
    data = Examples(pixels.flatten().byte().numpy(), begins, begins + 1024, np.array([0, 1], np.uint8), shift=1)
    config = Config(**{**vars(SMALL), "task": "image", "positions": positions, "pool": "mean", "background": "drop"})
    batch = collate(data, np.arange(2), config.shape)
    assert batch.ids.shape[1] < 100
    model = build_model(config, TASKS["image"], BlockMask.dense(1024, block=16)).eval()
    live = pixels > 0
    alone = BlockMask.from_dense((live[:, :, None] & live[:, None, :])[:, None], block=16)
    got = model(batch.ids, batch.lengths, batch.places)
    model.masks_for = lambda length, lengths: [alone] * len(model.layers)
    x = []
    model.norm.register_forward_hook(lambda module, args, out: x.append(out))
    model(pixels + 1, torch.tensor([1024, 1024]))
    want = model.head(torch.stack([x[0][row][live[row]].mean(0, keepdim=True) for row in range(2)]), torch.ones(2))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_rotations_make_the_product_depend_on_the_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def product(rotary, at, other):
        ends = (rotate(x, rotary(torch.tensor([[place]]))) for x, place in ((q, at), (k, other)))
        return torch.mul(*ends).sum()

    line, plane = RotaryPositions(16, None, 0), RotaryPositions(16, 32, 1)
    torch.testing.assert_close(product(line, 3, 10), product(line, 1003, 1010))
    assert abs(product(line, 3, 10) - product(line, 3, 11)) > 1e-3

    def pixel(row, column):
        return 1 + 32 * row + column  # after [CLS]

    torch.testing.assert_close(
        product(plane, pixel(2, 3), pixel(5, 1)), product(plane, pixel(12, 20), pixel(15, 18)), atol=1e-5, rtol=1e-5
    )
    assert abs(product(plane, pixel(2, 3), pixel(5, 1)) - product(plane, pixel(2, 3), pixel(1, 5))) > 1e-3


@pytest.mark.parametrize(("head_dim", "side"), [(5, None), (6, 32)])
def test_heads_that_cannot_be_rotated_are_refused(head_dim, side):
    with pytest.raises(ValueError, match=r"head_dim must be a positive multiple of [24] for rotary positions"):
        RotaryPositions(head_dim, side, 0)


def test_each_layer_has_its_own_mask():
    def reach(per_layer: list[BlockMask]) -> Tensor:
        torch.manual_seed(0)
        sizes = {
            "vocabulary": 17, "classes": 10, "towers": 1, "width": 8, "head_dim": None, "heads": 1, "mlp": 8,
            "dropout": 0.0, "attention_dropout": 0.0,
        }  # fmt: skip
        model = Classifier(per_layer, **sizes, pool="first", positions="learned")
        model(torch.ones(1, 48, dtype=torch.int64), torch.tensor([48])).sum().backward()
        return model.positions.grad.abs().sum(1) > 0

    diagonal = BlockMask.from_function(lambda q, k: q == k, 48, block=16)
    one_away = BlockMask.from_function(lambda q, k: (q - k).abs() <= 1, 48, block=16)
    ten_away = BlockMask.from_function(lambda q, k: ((q - k).abs() == 10) | (q == k), 48, block=16)
    assert reach([diagonal, diagonal]).nonzero().squeeze(1).tolist() == [0]
    assert reach([ten_away, one_away]).nonzero().squeeze(1).tolist() == [0, 1, 10, 11]


def test_pooling_reads_live_positions_only():
    x = torch.tensor([[[1.0, -5.0], [3.0, -7.0], [100.0, 100.0]]])
    lengths = torch.tensor([2])
    assert pool(x, lengths, "cls").tolist() == pool(x, lengths, "first").tolist() == [[1.0, -5.0]]
    assert pool(x, lengths, "mean").tolist() == [[2.0, -6.0]]
    assert pool(x, lengths, "max").tolist() == [[3.0, -5.0]]


def test_a_bracket_is_not_within_itself():
    ids = torch.frombuffer(bytearray(encode(b"( ( ( [MAX 3 ) ( ( ( [SM 4 ) 5 ) ] ) ) ] )")), dtype=torch.uint8).long()
    nesting = Nesting(TASKS["listops"].brackets, TASKS["listops"].vocabulary, 8)
    padded = torch.stack([torch.nn.functional.pad(ids, (1, 2)), torch.nn.functional.pad(ids, (0, 3))])
    assert nesting.depths(padded).tolist() == [[0, 0, 1, 1, 2, 2, 1, 0, 0, 0], [0, 1, 1, 2, 2, 1, 0, 0, 0, 0]]
    assert nesting.depths(torch.full((1, 50), 12)).tolist() == [[min(place, 31) for place in range(50)]]
    assert nesting(nesting.depths(padded)).shape == (2, 10, 8)


def test_sinusoidal_positions_are_distinct_and_as_large_as_the_embedding():
    positions = sinusoids(500, 32)
    assert torch.cdist(positions, positions).fill_diagonal_(1).min() > 0.1
    assert positions.norm(dim=1) == pytest.approx(torch.ones(500), abs=1e-5)
    with pytest.raises(ValueError, match="even width; got 33"):
        sinusoids(4, 33)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 30, "heads": 4}, "width must be a multiple of heads; got width 30, heads 4"),
        ({"pool": "sum"}, "pool must be one of cls, first, mean, max, mean\\+max; got 'sum'"),
        (
            {"positions": "none"},
            "positions must be one of learned, sinusoidal, rotary, rotary2d, nested, tree; got 'none'",
        ),
        ({"schedule": "step"}, "schedule must be one of constant, cosine, linear, rsqrt, trapezoid; got 'step'"),
        ({"precision": "fp8"}, "precision must be fp32 or bf16; got 'fp8'"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1; got 1.0"),
        ({"attention_dropout": -0.1}, "attention_dropout must be at least 0 and below 1; got -0.1"),
        ({"steps": 0}, "steps must be at least 1; got 0"),
        ({"clip": -1.0}, "clip must be at least 0; got -1.0"),
        ({"warmup": -1}, "warmup must be at least 0; got -1"),
        ({"lr": float("nan")}, "lr must be at least 0; got nan"),
        ({"minutes": 0.0}, "minutes must be more than 0"),
        (
            {"task": "text", "positions": "nested"},
            "positions=nested are for expressions with brackets; the task is text",
        ),
        ({"positions": "nested", "objective": "denoise"}, "counted from the tokens, which objective=denoise hides"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        model_with(BlockMask.dense(48, block=16), **changes)


def test_only_matrices_decay():
    model = model_with(BlockMask.dense(48, block=16))
    decaying, others = build_optimizer(Config(weight_decay=0.3), model).param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert all(parameter.ndim == 2 for parameter in decaying["params"])
    assert len(decaying["params"]) + len(others["params"]) == len(list(model.parameters()))
    assert model.embedding.weight in set(others["params"])


def test_schedules():
    assert [lr_schedule.factor("constant", step, 4, 0) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert lr_schedule.factor("cosine", 52, 4, 0.52) == pytest.approx(0.5)  # the middle of the steps after the warm-up
    assert lr_schedule.factor("cosine", 50, 4, 1.2) == 0
    assert [lr_schedule.factor("linear", step, 4, progress) for step, progress in ((1, 0), (28, 0.28), (50, 1.2))] == [
        0.5, 0.75, 0.0,
    ]  # fmt: skip
    # The Long Range Arena: 0.05 / sqrt(step) with a warm-up of 1000.
    assert 0.05 / math.sqrt(1000) * lr_schedule.factor("rsqrt", 3999, 1000, 0) == pytest.approx(0.05 / math.sqrt(4000))


@pytest.mark.parametrize(("name", "anneals"), [("linear", "linear"), ("cosine", "cos")])
@pytest.mark.parametrize("task", ["listops", "text", "image"])
def test_a_schedule_is_that_of_pytorch(name, anneals, task):
    preset = settings_of("nystromformer", task)
    steps, warmup = preset["steps"] // 10, preset["warmup"] // 10
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1.0, total_steps=steps, pct_start=warmup / steps, anneal_strategy=anneals, cycle_momentum=False
    )
    for step in range(steps):
        if step >= warmup:  # theirs begins at a 25th of the peak, and a cosine rises as one, too
            ours = lr_schedule.factor(name, step, warmup, step / steps)
            assert ours == pytest.approx(theirs.get_last_lr()[0], abs=3 / (steps - warmup))
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_attention_is_exact_on_the_models_tensors(precision, qk_norm):
    config = Config(**{**vars(SMALL), "precision": precision})
    model = model_with(masks.butterfly(80, block=16), pool="mean", qk_norm=qk_norm)
    batch = fake_batch(length=80)
    result = exactness.check(model, batch, config)
    assert result.holds
    assert 0 < result.ours < (1e-5 if precision == "fp32" else 0.1)
    call = exactness.capture(model, batch, config)
    assert call.q.dtype == (torch.float32 if precision == "fp32" else torch.bfloat16)
    assert call.dout.abs().sum((1, 3)).count_nonzero() == batch.live_tokens


def test_a_wrong_result_is_not_called_exact(monkeypatch):
    right = exactness.sparse

    def wrong(call):
        out, *gradients = right(call)
        out[0, 0, 0, 0] += 1e-3
        return [out, *gradients]

    monkeypatch.setattr(exactness, "sparse", wrong)
    assert not exactness.check(model_with(masks.butterfly(48, block=16)), fake_batch(), SMALL).holds
