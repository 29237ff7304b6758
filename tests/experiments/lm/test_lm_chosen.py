"""Blocks chosen at every step: the choice as in the paper, no look ahead, and runs with such layers."""

import pytest
import torch

from experiments.lm import patterns
from experiments.lm.config import configure
from experiments.lm.data.store import opened
from experiments.lm.model.chosen import ChosenBlocks
from experiments.lm.sample import opened as model_in
from experiments.lm.train import Run
from tests.experiments.lm.models import gradients, model_of, tiny, tokens

IDS = torch.randint(300, (2, 65), generator=torch.Generator().manual_seed(1))


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain(q, k, v, block, chosen):
    """Query by query, in fp64; also the number of live scores."""
    q, k, v = (x.double() for x in (q, k, v))
    out, live = torch.zeros_like(q), 0
    for b, h, place in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        own = place // block
        means = [k[b, h, i * block : (i + 1) * block].mean(0) for i in range(own)]
        best = sorted(range(own), key=lambda i: -float(q[b, h, place] @ means[i]))[: chosen - 1]
        seen = [t for i in sorted([*best, own]) for t in range(i * block, (i + 1) * block) if t <= place]
        weights = (k[b, h, seen] @ q[b, h, place] / q.shape[-1] ** 0.5).softmax(0)
        out[b, h, place] = weights @ v[b, h, seen]
        live += len(seen)
    return out, live


@pytest.mark.parametrize("chosen", [1, 2, 3])
def test_each_query_sees_its_own_block_and_the_best_before_it(chosen):
    q, k, v = (random(2, 2, 96, 16, seed=seed) for seed in range(3))
    layer = ChosenBlocks(96, 16, chosen)
    expected, live = plain(q, k, v, 16, chosen)
    torch.testing.assert_close(layer.attention(q, k, v).double(), expected, atol=1e-5, rtol=1e-5)
    assert layer.density == pytest.approx(live / (4 * 96**2))


def test_with_all_blocks_it_is_dense():
    loss, ours = gradients(model_of("dense", "sparseflash"), IDS)
    layers = [ChosenBlocks(64, 16, 4)] * 2
    model = model_of("dense", "sparseflash")
    model.attentions = tuple(layer.attention for layer in layers)
    other, theirs = gradients(model, IDS)
    torch.testing.assert_close(other, loss)
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("pattern", ["moba", "local,moba"])
def test_no_token_sees_a_later_one(pattern):
    model = model_of(pattern, "sparseflash")
    changed = IDS.clone()
    changed[:, 40:] = (changed[:, 40:] + 7) % 300
    with torch.no_grad():
        ours, theirs = (model(ids[:, :-1], ids[:, 1:], each=True) for ids in (IDS, changed))
    assert torch.equal(ours[:, :39], theirs[:, :39])
    assert not torch.equal(ours[:, 40:], theirs[:, 40:])


def test_layers_of_one_pattern_are_one_object_with_as_many_tokens_as_the_window():
    first, second, third = patterns.of_layers("moba,local", 3, 2, 256, window=64, block=16)
    assert first is third and first == ChosenBlocks(256, 16, 4) and second.q_len == 256
    with pytest.raises(ValueError, match="the pattern moba needs a context of whole blocks of 16 tokens; got 250"):
        patterns.of_layers("moba", 1, 2, 250, window=64, block=16)


def test_a_run_pauses_resumes_and_is_opened(tmp_path):
    store = tokens(tmp_path)
    config = tiny(pattern="local,moba")
    whole = Run(config, store, tmp_path / "whole").train()
    Run(config, store, tmp_path / "parts").train(pause=lambda step: step == 4)
    again = Run(config, opened(store.folder), tmp_path / "parts", resume=True).train()
    assert again["val_loss"] == whole["val_loss"]
    model, config, _ = model_in(tmp_path / "whole", torch.device("cpu"))
    assert model.scores(IDS[:1, :64] % 257, 63).shape[-1] >= 257


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"documents": "separate"}, "documents must be joined if blocks are chosen at every step; got separate with"),
        ({"recorded": True}, "recorded must be False if blocks are chosen"),
        ({"context_parallel": 2}, "context_parallel must be 1 if blocks are chosen"),
        ({"compiled": "model"}, "compiled must be none or block if blocks are chosen"),
        ({"attention": "sdpa"}, "attention must be sparseflash if blocks are chosen"),
    ],
)
def test_what_no_chosen_blocks_can_do_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        configure("124M", {"pattern": "local,moba", **changes})
