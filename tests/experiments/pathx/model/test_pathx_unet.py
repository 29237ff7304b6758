import numpy as np
import pytest
import torch

from experiments.pathx import weights
from experiments.pathx.config import Config
from experiments.pathx.data.device_batch import on_device
from experiments.pathx.data.packing import pack, stack
from experiments.pathx.data.static_packing import StaticPacking
from experiments.pathx.losses import forward
from experiments.pathx.model.unet import UNet, images_of
from experiments.training.optimizer import adamw
from tests.experiments.pathx.images import image
from tests.experiments.pathx.steps import compute_gradients, training_step

CPU = torch.device("cpu")
IMAGES = [image(0, side=32), image(1, side=32, lit=0.05), np.zeros((32, 32), np.uint8), image(2, side=32, lit=1.0)]
LABELS = [1, 0, 1, 0]
FP32 = Config(precision="fp32", model="unet")


def model_of():
    torch.manual_seed(3)
    return UNet(width=64, head=16)


def packed_batch(images=IMAGES, labels=LABELS, **more):
    return on_device(pack(images, labels, (), block=16, **more), (), CPU)


@pytest.mark.parametrize(
    "batch",
    [
        packed_batch(),
        packed_batch(blocks=500),
        on_device(stack(IMAGES, LABELS, (), block=16), (), CPU),
        on_device(pack(IMAGES, LABELS, (), block=16, registers=2), (), CPU, 2),
    ],
    ids=["packed", "padded", "whole", "registers"],
)
def test_the_images_of_a_batch_are_those_it_was_made_from(batch):
    assert torch.equal(images_of(batch)[:, 0], torch.from_numpy(np.stack(IMAGES)).short())


def test_entries_that_are_not_images_are_black_and_change_no_gradient():
    packed = pack(IMAGES, LABELS, (), block=16, blocks=200)
    filled = StaticPacking(packed, CPU, (), 0, images=6, blocks=70).on_device()
    found = images_of(filled)
    assert torch.equal(found[:4, 0], torch.from_numpy(np.stack(IMAGES)).short())
    assert found.shape == (6, 1, 32, 32) and not found[4:].any()
    model = model_of().double()
    compute_gradients(model, on_device(packed, (), CPU), FP32)
    expected = {name: each.grad.clone() for name, each in model.named_parameters()}
    compute_gradients(model, filled, FP32)
    for name, each in model.named_parameters():
        assert torch.allclose(each.grad, expected[name], rtol=0, atol=1e-12), name


def test_answers_are_those_of_the_image_in_either_layout_and_alone():
    model = model_of().double()
    packed, _ = model(packed_batch())
    whole, _ = model(on_device(stack(IMAGES, LABELS, (), block=16), (), CPU))
    assert torch.equal(packed, whole)
    for number, each in enumerate(IMAGES):
        alone, _ = model(packed_batch([each], [0]))
        assert torch.allclose(packed[number], alone[0], rtol=0, atol=1e-12)


def test_the_gradient_reaches_every_weight():
    model = model_of()
    compute_gradients(model, packed_batch(), FP32)
    assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in model.parameters())


@pytest.mark.parametrize("side", [32, 64, 128])
def test_the_same_weights_read_every_size(side):
    logits, other = model_of()(packed_batch([image(0, side=side), image(1, side=side)], [0, 1]))
    assert logits.shape == (2, 2) and other is None


def test_a_pixel_anywhere_changes_the_answer():
    model = model_of().double()
    batches = [IMAGES[1]]
    for y, x in ((0, 0), (31, 31), (0, 31)):
        batches.append(IMAGES[1].copy())
        batches[-1][y, x] ^= 128
    logits, _ = model(packed_batch(batches, [0] * 4))
    assert len({tuple(each.tolist()) for each in logits}) == 4


def test_in_bf16_the_answers_are_about_the_same():
    model = model_of()
    batch = packed_batch()
    fp32, _ = forward(model, batch, FP32)
    bf16, _ = forward(model, batch, Config(precision="bf16", model="unet"))
    assert bf16.dtype == torch.float32
    assert torch.allclose(bf16, fp32, rtol=0, atol=0.02)


def test_some_steps_learn_a_batch_by_heart():
    model = model_of()
    batch = packed_batch()
    optimizer = adamw(model, 3e-3, 0.0)
    outcomes = [training_step(model, optimizer, batch, FP32, 3e-3) for _ in range(30)]
    assert outcomes[-1].loss < 0.2 * outcomes[0].loss
    assert int(outcomes[-1].right) == 4


def test_it_is_as_large_as_said():
    """About as large as the stored transformer of 1,261,762 parameters."""
    parameters = sum(each.numel() for each in weights.build(Config(model="unet")).parameters())
    assert f"{parameters:,}" in UNet.__doc__
    assert 1.0 < parameters / 1_261_762 < 1.1


def test_its_width_must_fill_the_groups_of_its_normalisation():
    with pytest.raises(ValueError, match="the width of a U-Net must be a multiple of 64; got 96"):
        UNet(width=96, head=16)
