from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from experiments.lra.config import Config
from experiments.lra.model.build import build_model, mask_of
from experiments.lra.tasks import TASKS
from experiments.training.layers.transformer import DepthwiseConvolution
from tests.experiments.lra.models import SMALL, fake_batch
from tests.experiments.lra.runs import TINY_IMAGES

IMAGES = replace(TINY_IMAGES, auxiliary=0.0, background="keep", convolution=3, width=32, heads=2)


def drawn(layer):
    with torch.no_grad():
        layer.weight.normal_()
    return layer


def test_a_sequence_is_convolved_as_by_pytorch():
    layer = drawn(DepthwiseConvolution(6, 7).double())
    x = torch.randn(2, 20, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), x + F.conv1d(x.mT, layer.weight.T[:, None], padding=3, groups=6).mT)


@pytest.mark.parametrize("size", [3, 5])
def test_an_image_is_convolved_in_two_dimensions_as_by_pytorch(size):
    layer = drawn(DepthwiseConvolution(6, size, side=8).double())
    x = torch.randn(2, 64, 6, dtype=torch.float64)
    image = x.mT.unflatten(2, (8, 8))
    expected = F.conv2d(image, layer.weight.T.reshape(6, 1, size, size), padding=size // 2, groups=6).flatten(2).mT
    torch.testing.assert_close(layer(x), x + expected)


@pytest.mark.parametrize("positions", ["rotary", "nested"])
def test_answers_do_not_depend_on_the_padding(positions):
    config = replace(SMALL, convolution=5, positions=positions, pool="mean")
    model = build_model(config, TASKS["listops"], mask_of(config)).double().eval()
    for module in model.modules():
        if isinstance(module, DepthwiseConvolution):
            drawn(module)
    batch = fake_batch()
    found = model(batch.ids, batch.lengths)
    for row, length in enumerate(batch.lengths.tolist()):
        alone = model(batch.ids[row : row + 1, :length], batch.lengths[row : row + 1], padded=False)
        torch.testing.assert_close(found[row : row + 1], alone)


def test_a_convolution_changes_nothing_before_training_and_is_trained():
    batch = fake_batch()
    plain = build_model(SMALL, TASKS["listops"], mask_of(SMALL)).eval()
    config = replace(SMALL, convolution=5)
    model = build_model(config, TASKS["listops"], mask_of(config)).eval()
    model.load_state_dict({**model.state_dict(), **plain.state_dict()})
    assert torch.equal(model(batch.ids, batch.lengths), plain(batch.ids, batch.lengths))
    assert sum(isinstance(each, DepthwiseConvolution) for each in model.modules()) == 1 + config.depth
    model.train()(batch.ids, batch.lengths).square().sum().backward()
    assert all(each.weight.grad.abs().sum() > 0 for each in model.modules() if isinstance(each, DepthwiseConvolution))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"convolution": 4}, "convolution must be 0, or odd and at least 3; got 4"),
        ({"convolution": 1}, "convolution must be 0, or odd and at least 3; got 1"),
        (
            {"background": "drop"},
            "needs all of its pixels and nothing else .* got background=drop, pool=mean",
        ),
        ({"pool": "cls"}, "needs all of its pixels and nothing else in a row: .*, pool=cls, max_tokens=1024, block=64"),
        ({"max_tokens": 512}, "needs all of its pixels .* max_tokens=1024 and a block that divides it; got .*=512"),
        ({"block": 96}, "needs all of its pixels .* block=96"),
    ],
)
def test_settings_that_allow_no_convolution_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(IMAGES, **changes)


def test_processes_that_share_a_sequence_have_no_convolution():
    with pytest.raises(ValueError, match="convolution must be 0 if context_parallel is above 1"):
        Config(convolution=3, context_parallel=2)
