from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments.pathx.attention_maps import attention_from, draw, marker_tokens
from experiments.pathx.config import Config
from experiments.pathx.data.device_batch import on_device
from experiments.pathx.data.packing import PADDING, pack, stack
from experiments.pathx.losses import forward, pixel_loss
from experiments.pathx.masks.relations import parse_layers
from experiments.pathx.model.classifier import PathModel
from experiments.pathx.scoring import score
from experiments.training.layers.attention import ElementMask
from experiments.training.optimizer import adamw
from tests.experiments.pathx.images import image
from tests.experiments.pathx.steps import training_step

CPU = torch.device("cpu")
LAYERS = parse_layers("near:4,rows:1,columns:1,axial:0,butterfly:4,dense")
IMAGES = [image(0), image(1, lit=0.15), image(2, lit=0.7)]
LABELS = [1, 0, 1]
FP32 = Config(precision="fp32")


def model_of(**settings):
    torch.manual_seed(3)
    return PathModel(**{"depth": len(LAYERS), "width": 16, "heads": 2, "mlp": 16, **settings})


@pytest.mark.parametrize("registers", [0, 2])
def test_leaving_out_the_background_is_masking_it(registers):
    model = model_of(registers=registers, pixel_classes=3).double()
    packed = on_device(pack(IMAGES, LABELS, LAYERS, block=16, registers=registers), LAYERS, CPU, registers)
    logits, counts = model(packed)
    logits.square().sum().backward()
    gradients = {name: weights.grad.clone() for name, weights in model.named_parameters() if weights.grad is not None}

    whole = stack(IMAGES, LABELS, LAYERS, block=16, registers=registers)
    whole.ids[whole.ids == 0] = PADDING
    masked = on_device(whole, LAYERS, CPU, registers)
    dense = []
    for mask, order in zip(masked.masks, masked.layer_orders):
        live = masked.live if order == "hilbert" else masked.live[:, masked.orders[order].order]  # [B, N]
        scores = (mask.to_dense() & live[:, None, :, None] & live[:, None, None, :]).contiguous()
        empty = ~scores.any(-1, keepdim=True)
        dense.append(ElementMask(scores | empty, empty))
    for layer in model.layers:
        layer.attention.implementation = "standard"
    model.zero_grad()
    others, other_counts = model(replace(masked, masks=tuple(dense)))
    others.square().sum().backward()

    assert torch.allclose(logits, others, rtol=0, atol=1e-12)
    for name, weights in model.named_parameters():
        if weights.grad is not None:
            assert torch.allclose(weights.grad, gradients[name], rtol=0, atol=1e-11), name
    first = counts[0][packed.live[0]]
    second = torch.cat([each[live] for each, live in zip(other_counts, masked.live)])
    assert torch.allclose(first, second, rtol=0, atol=1e-12)


def test_with_the_background_the_answers_are_others():
    """Otherwise the test above would pass if black pixels never mattered."""
    model = model_of().double()
    packed = on_device(pack(IMAGES, LABELS, LAYERS, block=16), LAYERS, CPU)
    whole = on_device(stack(IMAGES, LABELS, LAYERS, block=16), LAYERS, CPU)
    assert not torch.allclose(model(packed)[0], model(whole)[0], atol=1e-6)


def test_an_image_gets_the_same_answer_alone():
    model = model_of().double()
    together, _ = model(on_device(pack(IMAGES, LABELS, LAYERS, block=16, blocks=50), LAYERS, CPU))
    for number, each in enumerate(IMAGES):
        alone, _ = model(on_device(pack([each], [0], LAYERS, block=16), LAYERS, CPU))
        assert torch.allclose(together[number], alone[0], rtol=0, atol=1e-12)


def test_positions_are_relative():
    layers = parse_layers("near:4,rows:1,columns:1")
    model = model_of(depth=3).double()
    moved = np.zeros((32, 32), np.uint8)
    moved[9:25, 13:29] = IMAGES[0]
    answers = [
        model(on_device(pack([each], [0], layers, block=16), layers, CPU))[0] for each in (IMAGES[0], moved)
    ]  # fmt: skip
    assert torch.allclose(*answers, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", [pack, stack])
def test_some_steps_learn_a_batch_by_heart(form):
    layers = parse_layers("near:4,rows:1,dense")
    model = model_of(depth=3, width=32, pixel_classes=3)
    traced = [(each > 100).astype(np.uint8) for each in IMAGES]
    batch = on_device(form(IMAGES, LABELS, layers, block=32, pixel_labels=traced), layers, CPU)
    optimizer = adamw(model, 3e-3, 0.0)
    config = replace(FP32, auxiliary=1.0)
    outcomes = [training_step(model, optimizer, batch, config, 3e-3) for _ in range(40)]
    assert outcomes[-1].loss < 0.2 * outcomes[0].loss
    assert outcomes[-1].auxiliary < 0.7 * outcomes[0].auxiliary
    assert int(outcomes[-1].right) == 3


def test_the_auxiliary_loss_is_of_drawn_pixels_alone():
    traced = [(each > 100).astype(np.uint8) for each in IMAGES]
    batch = on_device(pack(IMAGES, LABELS, LAYERS, block=16, registers=2, pixel_labels=traced), LAYERS, CPU, 2)
    counts = torch.zeros(1, batch.ids.shape[1], 3)
    drawn = (batch.ids[0] > 0) & (batch.ids[0] < 256)
    counts[0, ~drawn, 2] = 50.0
    assert float(pixel_loss(counts, batch, drawn[None])) == pytest.approx(np.log(3))
    with pytest.raises(ValueError, match="it has none"):
        pixel_loss(counts, replace(batch, pixel_labels=None), drawn[None])


def test_scores_follow_the_labels():
    model = model_of()
    found = score(model, [pack(IMAGES[:2], LABELS[:2], LAYERS, block=16), pack(IMAGES[2:], [1], LAYERS, block=16)],
                  LAYERS, FP32, CPU)  # fmt: skip
    assert found.labels.tolist() == LABELS
    logits, _ = forward(model, on_device(pack(IMAGES, LABELS, LAYERS, block=16), LAYERS, CPU), FP32)
    assert torch.allclose(found.chances.float(), logits.softmax(-1)[:, 1], atol=1e-6)
    assert found.accuracy == pytest.approx(float((logits.argmax(-1) == torch.tensor(LABELS)).float().mean()))


def test_attention_maps_are_the_weights_of_the_attention():
    model = model_of()
    batch = on_device(pack(IMAGES[:1], [1], LAYERS, block=16), LAYERS, CPU)
    weights = attention_from(model, batch, [0, 5])
    assert weights.shape == (len(LAYERS), 2, batch.ids.shape[1])
    assert torch.allclose(weights.sum(-1), torch.ones(len(LAYERS), 2), atol=1e-5)
    assert float(weights[:, :, ~batch.live[0]].abs().max()) == 0
    y, x = batch.y[0].long(), batch.x[0].long()
    near = ((y - y[5]).abs() <= 4) & ((x - x[5]).abs() <= 4) & batch.live[0]
    assert torch.equal(weights[0, 1] > 0, near)
    row = ((y - y[5]).abs() <= 1) & batch.live[0]
    assert torch.equal(weights[1, 1] > 0, row)


def test_attention_maps_are_drawn_from_the_tokens_at_the_markers(tmp_path):
    batch = on_device(pack(IMAGES[:1], [1], LAYERS, block=16), LAYERS, CPU)
    lit = np.argwhere(IMAGES[0])[[3, -3]]
    tokens = marker_tokens(batch, lit)
    assert [(int(batch.y[0, t]), int(batch.x[0, t])) for t in tokens] == [tuple(each) for each in lit.tolist()]
    weights = attention_from(model_of(), batch, tokens)
    draw(IMAGES[0], batch, weights, [each.name for each in LAYERS], "title", tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 10_000


def test_width_must_be_divisible_by_heads():
    with pytest.raises(ValueError, match="multiple of heads"):
        model_of(width=18, heads=4)
