import pytest
import torch

from experiments.lra.metrics import plateau_left_at
from experiments.training.weight_average import WeightAverage


def test_the_average_follows_the_weights_and_is_swapped_in_and_out():
    model = torch.nn.Linear(2, 1)
    start = [p.detach().clone() for p in model.parameters()]
    average = WeightAverage(model, 0.75)
    for _ in range(2):
        with torch.no_grad():
            for p in model.parameters():
                p += 1
        average.update()
    # 0.75 (0.75 * 0 + 0.25 * 1) + 0.25 * 2
    with average.in_place():
        for p, first in zip(model.parameters(), start, strict=True):
            torch.testing.assert_close(p.detach(), first + 0.6875)
    for p, first in zip(model.parameters(), start, strict=True):
        torch.testing.assert_close(p.detach(), first + 2)


def test_an_error_inside_leaves_the_weights_as_they_were():
    model = torch.nn.Linear(2, 1)
    average = WeightAverage(model, 0.5)
    weights = [p.detach().clone() for p in model.parameters()]
    for value in average.weights.values():
        value.zero_()
    with pytest.raises(RuntimeError, match="inside"), average.in_place():
        raise RuntimeError("inside")
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))


def log(*losses):
    return [{"kind": "train", "step": 10 * (i + 1), "loss": loss} for i, loss in enumerate(losses)]


def test_the_plateau_is_left_where_the_loss_stays_below():
    assert plateau_left_at(log(*[0.69] * 30), 0.693) is None
    assert plateau_left_at(log(*[0.69] * 10, *[0.3] * 20), 0.693) == 110
    assert plateau_left_at(log(*[0.3] * 10, *[0.69] * 30), 0.693) is None
    assert plateau_left_at(log(0.1), 0.693) == 10
