"""Training losses: CutMix."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from experiments.lra.config import Config
from experiments.lra.data.batches import Batch
from experiments.lra.losses import losses, outputs, pasted
from experiments.lra.model.build import build_model
from experiments.lra.tasks import TASKS
from sparseflash import BlockMask

SIDE = 32


def images(count: int) -> torch.Tensor:
    """Each of one brightness, its number."""
    return torch.arange(1, count + 1)[:, None].repeat(1, SIDE * SIDE)


def test_squares_come_from_the_image_before_and_their_shares_are_counted():
    torch.manual_seed(0)
    ids, shares = pasted(images(400), SIDE, 1.0)
    own = images(400)
    other = ids != own
    assert torch.equal(ids[other], own.roll(1, 0)[other])
    assert torch.equal(shares, other.float().mean(1))
    assert 0.2 < shares.mean() < 0.4 and shares.max() > 0.8  # edges cut squares off
    for image in other.view(-1, SIDE, SIDE)[:40]:
        rows, columns = image.any(1).nonzero(), image.any(0).nonzero()
        if len(rows):
            assert image[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].all()
            assert image.sum() == (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)


@pytest.mark.parametrize(("chance", "low", "high"), [(0.0, 0, 0), (0.5, 140, 220)])
def test_some_images_stay_whole(chance, low, high):
    torch.manual_seed(1)
    shares = pasted(images(400), SIDE, chance)[1]
    assert low <= (shares > 0).sum() <= high


def test_the_loss_counts_both_answers_by_their_areas():
    config = Config(
        task="image", pool="mean", block=64, depth=1, width=16, heads=2, mlp=16, dropout=0.0, cutmix=1.0,
        encoding="brightness", label_smoothing=0.1, mask="local",
    )  # fmt: skip
    model = build_model(config, TASKS["image"], BlockMask.dense(1024, block=64))
    ids = torch.randint(1, 257, (4, 1024))
    labels = torch.tensor([1, 2, 3, 4])
    batch = Batch(ids, torch.full((4,), 1024, dtype=torch.int32), None, labels, ids.numel())
    torch.manual_seed(3)
    got, outcome = losses(model, batch, config)
    torch.manual_seed(3)
    mixed, shares = pasted(ids, SIDE, 1.0)
    logits = outputs(model, replace(batch, ids=mixed), config)[0]
    answers = torch.zeros(4, 10)
    for row, share in enumerate(shares.tolist()):
        answers[row, labels[row]] += 1 - share
        answers[row, labels[row - 1]] += share
    torch.testing.assert_close(got, F.cross_entropy(logits, answers, label_smoothing=0.1))
    torch.testing.assert_close(outcome.loss, got.detach())


def test_brightness_is_a_line():
    config = Config(task="image", pool="mean", block=64, width=16, heads=2, encoding="brightness", mask="local")
    embedding = build_model(config, TASKS["image"], BlockMask.dense(1024, block=64)).embedding
    values = embedding(torch.tensor([[1, 128, 256]]))[0]
    torch.testing.assert_close(values[0], embedding.middle - embedding.slope)
    torch.testing.assert_close(values[2], embedding.middle + embedding.slope)
    torch.testing.assert_close(values[1], embedding.middle - embedding.slope / 255)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"task": "text", "cutmix": 0.5}, "cutmix=0.5 is for images; the task is text"),
        ({"task": "text", "encoding": "brightness"}, "encoding=brightness is for images; the task is text"),
        ({"task": "image", "encoding": "colour"}, "encoding must be one of tokens, brightness; got 'colour'"),
        (
            {"task": "image", "encoding": "brightness", "objective": "denoise", "pool": "mean"},
            "encoding must be tokens if objective=denoise or pool=cls: .*; got objective=denoise, pool=mean",
        ),
        (
            {"task": "image", "encoding": "brightness", "pool": "cls"},
            r"hidden pixels and \[CLS\] have no brightness; got objective=classify, pool=cls",
        ),
        (
            {"task": "image", "cutmix": 0.5, "pool": "mean", "context_parallel": 2},
            "cutmix must be 0 if context_parallel is above 1: each process draws squares of its own",
        ),
        ({"task": "image", "cutmix": 0.5}, "cutmix needs whole images and answers alone: .*pool=cls"),
        (
            {"task": "pathfinder32", "pool": "mean", "auxiliary": 0.5, "cutmix": 0.5},
            "cutmix needs whole images and answers alone: .*auxiliary=0.5",
        ),
        ({"task": "image", "cutmix": 1.5}, "cutmix must be at least 0 and at most 1; got 1.5"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        Config(**settings)
