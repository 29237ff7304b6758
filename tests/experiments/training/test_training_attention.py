import numpy as np
import pytest
import torch
from torch.nn import functional as F

from experiments.lra.config import Config
from experiments.lra.data.batches import collate
from experiments.lra.losses import forward
from experiments.lra.model.build import build_model, build_optimizer
from experiments.lra.tasks import TASKS
from experiments.training.layers.attention import IMPLEMENTATIONS, ElementMask, row_multiple, standard_attention
from experiments.training.layers.transformer import SelfAttention
from sparseflash import BlockMask, masks
from tests.experiments.lra.models import SMALL, examples, fake_batch, training_step

MASKS = {
    "dense": BlockMask.dense(48, block=16),
    "local": masks.local(48, window=8, block=16),
    "last keys": BlockMask.from_function(lambda q, k: (k > 36) | ((q == 3) & (k == 3)), 48, block=16),
}


def results(attention, mask, batch, **changes):
    config = Config(**{**vars(SMALL), **changes, "attention": attention})
    model = build_model(config, TASKS["listops"], MASKS[mask])
    logits = forward(model, batch, config)
    return [logits, *torch.autograd.grad(F.cross_entropy(logits, batch.labels), list(model.parameters()))]


@pytest.mark.parametrize("attention", ["sdpa", "sparseflash"])
@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("mask", MASKS)
def test_all_implementations_give_the_same_logits_and_gradients(mask, heads, attention):
    ours, plain = (results(name, mask, fake_batch(), heads=heads) for name in (attention, "standard"))
    for x, y in zip(ours, plain, strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
def test_rows_as_short_as_the_implementation_likes_change_nothing(attention):
    data, rows = examples([30, 30, 30]), np.arange(3)
    shapes = [Config(block=16, max_tokens=40, attention=name).shape for name in ("sparseflash", attention)]
    whole, own = (collate(data, rows, shape) for shape in shapes)
    assert own.ids.shape[1] == {"sparseflash": 32, "sdpa": 31, "standard": 32}[attention]
    assert shapes[0].length == shapes[1].length == 48
    for x, y in zip(results(attention, "local", own), results("sparseflash", "local", whole), strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=1e-3)


def test_without_padding_no_mask_is_given():
    assert ElementMask.within(None, None, 48).scores is None
    lengths = torch.tensor([2, 3])
    assert ElementMask.within(None, lengths, 3).scores.tolist() == [[[[True, True, False]]], [[[True, True, True]]]]
    data = examples([31, 31])
    batch = collate(data, np.arange(2), Config(block=16, max_tokens=40, attention="sdpa").shape)
    model = build_model(Config(**{**vars(SMALL), "attention": "sdpa"}), TASKS["listops"], MASKS["dense"])
    seen = []
    attention, mix = model.layers[0].attention, SelfAttention.mix
    attention.mix = lambda q, k, v, mask: seen.append(mask) or mix(attention, q, k, v, mask)
    forward(model, batch, SMALL)
    assert seen[0].scores is None


def test_a_query_without_live_keys_gives_0_and_no_gradient():
    q, k, v = (torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3))
    pattern = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]).bool()[None, None]
    out = standard_attention(q, k, v, ElementMask.within(pattern, torch.tensor([3]), 4))
    out.sum().backward()
    assert out[0, 0, 0].tolist() == out[0, 0, 3].tolist() == [0.0] * 8
    torch.testing.assert_close(out[0, 0, 1], v[0, 0, 0])
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert v.grad[0, 0, 3].tolist() == [0.0] * 8


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
def test_every_implementation_trains_with_dropout(attention, precision):
    settings = {"attention": attention, "attention_dropout": 0.2, "dropout": 0.1, "precision": precision}
    config = Config(**{**vars(SMALL), **settings})
    model = build_model(config, TASKS["listops"], MASKS["local"])
    optimizer, batch = build_optimizer(config, model), fake_batch()
    losses = [training_step(model, optimizer, batch, config, config.lr)[0].item() for _ in range(12)]
    assert losses[-1] < losses[0] - 0.2


def test_blocks_that_are_no_eights_still_hold_whole_rows():
    assert [row_multiple(name, 12) for name in IMPLEMENTATIONS] == [12, 1, 4]
    with pytest.raises(ValueError, match="attention must be one of sparseflash, sdpa, standard; got 'flash'"):
        Config(attention="flash")
