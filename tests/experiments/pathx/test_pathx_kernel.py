import copy
from dataclasses import replace

import pytest
import torch

from experiments.pathx.config import Config
from experiments.pathx.data.device_batch import on_device
from experiments.pathx.data.packing import pack, stack
from experiments.pathx.losses import forward
from experiments.pathx.masks.relations import parse_layers
from experiments.pathx.model.classifier import PathModel
from experiments.training.optimizer import adamw
from sparseflash import attention
from tests.experiments.pathx.images import image
from tests.experiments.pathx.steps import training_step
from tests.watched.waiting import waiting_raises

LAYERS = parse_layers("near:4,rows:1,columns:1,tiles:3,dense")
IMAGES = [image(0), image(1, lit=0.15), image(2, lit=0.7)]
LABELS = [1, 0, 1]


def test_the_kernel_agrees_with_the_tiles_on_packed_masks():
    layers = parse_layers("near:4,dense")
    batch = on_device(pack(IMAGES[:2], LABELS[:2], layers, block=32, blocks=7), layers, torch.device("cpu"))
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, batch.ids.shape[1], 16).unbind()
    for mask in batch.masks:
        expected = attention(q, k, v, mask, backend="blockwise")
        assert torch.allclose(attention(q, k, v, mask, backend="triton"), expected, atol=1e-5)
        assert float(expected.abs().max()) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("form", [pack, stack])
def test_a_step_on_the_gpu_is_that_of_the_cpu(form):
    torch.manual_seed(1)
    model = PathModel(depth=len(LAYERS), width=32, heads=2, mlp=32)
    config = Config(precision="fp32")
    losses = {}
    for name in ("cpu", "cuda"):
        device = torch.device(name)
        own = copy.deepcopy(model).to(device)
        batch = on_device(form(IMAGES, LABELS, LAYERS, block=32), LAYERS, device)
        optimizer = adamw(own, 1e-3, 0.0)
        losses[name] = [float(training_step(own, optimizer, batch, config, 1e-3).loss) for _ in range(5)]
    assert losses["cuda"] == pytest.approx(losses["cpu"], abs=2e-3)
    assert losses["cuda"][-1] < losses["cuda"][0]


@pytest.mark.gpu
def test_no_step_waits_for_the_gpu():
    device = torch.device("cuda")
    torch.manual_seed(1)
    model = PathModel(depth=len(LAYERS), width=32, heads=2, mlp=32).to(device)
    optimizer, config = adamw(model, 1e-3, 0.0), Config()
    packed = [
        pack(IMAGES, LABELS, LAYERS, block=64, blocks=12),
        pack(IMAGES[::-1], LABELS, LAYERS, block=64, blocks=12),
    ]
    for each in packed:
        training_step(model, optimizer, on_device(each, LAYERS, device), config, 1e-3)
    with waiting_raises():
        for each in packed:
            training_step(model, optimizer, on_device(each, LAYERS, device), config, 1e-3)


@pytest.mark.gpu
def test_compiled_layers_change_nothing_but_rounding():
    device = torch.device("cuda")
    torch.manual_seed(1)
    model = PathModel(depth=len(LAYERS), width=32, heads=2, mlp=32).to(device)
    batch = on_device(pack(IMAGES, LABELS, LAYERS, block=64), LAYERS, device)
    model.train()
    plain, _ = forward(model, batch, Config())
    model.compile_layers()
    compiled, _ = forward(model, batch, replace(Config(), compiled=True))
    exact, _ = forward(model, batch, Config(precision="fp32"))
    assert (compiled - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-2
