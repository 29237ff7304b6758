import pytest
import torch

from experiments.lm import patterns
from experiments.lm.config import configure
from experiments.lm.data.store import opened
from experiments.lm.model.chosen import Choices, ChosenBlocks, choices_kept
from experiments.lm.probe import Example, right_blocks
from experiments.lm.sample import opened as model_in
from experiments.lm.train import Run
from tests.experiments.lm.models import gradients, model_of, tiny, tokens

IDS = torch.randint(300, (2, 65), generator=torch.Generator().manual_seed(1))


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain(q, k, v, block, chosen):
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
    found = layer.layer(32, 2, 2, 16)(random(2, 96, 32), q, k, v, None)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert layer.density == pytest.approx(live / (4 * 96**2))


def test_with_all_blocks_it_is_dense():
    loss, ours = gradients(model_of("dense", "sparseflash"), IDS)
    other, theirs = gradients(model_of("moba", "sparseflash", window=64), IDS)
    torch.testing.assert_close(other, loss)
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("kv_heads", [None, 1])
@pytest.mark.parametrize("pattern", ["moba", "local,moba", "msa", "nsa"])
def test_no_token_sees_a_later_one(pattern, kv_heads):
    model = model_of(pattern, "sparseflash", kv_heads=kv_heads)
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


@pytest.mark.parametrize(
    ("pattern", "kv_heads", "layers", "choices_of_layer"),
    [("moba", None, 2, 2), ("local,msa", None, 1, 2), ("nsa", None, 2, 2), ("dense", None, 0, 0), ("msa", 1, 2, 1),
     ("nsa", 1, 2, 1), ("moba", 1, 2, 2)],
)  # fmt: skip
def test_choices_are_kept_for_a_while(pattern, kv_heads, layers, choices_of_layer):
    """Heads of a group share them, but for MoBA's."""
    model = model_of(pattern, "sparseflash", kv_heads=kv_heads).eval()
    before = model(IDS[:, :-1], IDS[:, 1:], each=True)
    with choices_kept(model) as choices:
        assert torch.equal(model(IDS[:, :-1], IDS[:, 1:], each=True), before)
    model(IDS[:, :-1], IDS[:, 1:])
    assert [(each.block, each.index.shape[:3]) for each in choices] == [(16, (2, choices_of_layer, 64))] * layers
    assert all((each.index[:, :, -1] == 3).any(2).all() for each in choices), "its own block is always chosen"


def test_the_blocks_of_what_is_repeated_are_counted():
    row = Example(None, None, first=10, end=12, distance=4)  # tokens 6 and 7, in block 3 of two tokens
    index = torch.zeros(1, 2, 12, 2, dtype=torch.int64)
    index[0, 0, 9] = torch.tensor([1, 3])
    index[0, 1, 9:11] = torch.tensor([[3, 4], [0, 3]])
    found = right_blocks(row, [Choices(2, index), Choices(4, index)])
    assert found.tolist() == [[1, 0], [1, 1], [1, 0], [0, 0]]


@pytest.mark.parametrize("window", [16, 64, 256])
def test_the_share_of_live_scores_of_nsa(window):
    layer = patterns.chosen(256, window=window, block=16, kind="nsa")
    native = layer.layer(32, 2, 2, 16).layer
    t = torch.arange(256)
    own = [min(layer._blocks - 1, p // 16) * 16 + p % 16 + 1 for p in range(256)]
    near = ((t <= t[:, None]) & (t > t[:, None] - native.window)).sum()
    past = (t[: (256 - 8) // 4 + 1] * 4 + 7 <= t[:, None]).sum()
    assert (native.block, native.chosen, native.compression, native.stride) == (16, layer._blocks, 8, 4)
    assert layer.density * 256**2 == pytest.approx(float(sum(own) + near + past))


@pytest.mark.parametrize(("positions", "kv_heads"), [("rotary", None), ("learned", None), ("rotary", 1)])
def test_an_indexer_is_taught_and_the_loss_is_that_of_the_text(positions, kv_heads):
    model = model_of("msa", "sparseflash", positions=positions, kv_heads=kv_heads, window=64).train()
    dense = model_of("dense", "sparseflash", positions=positions, kv_heads=kv_heads).train()
    loss, _ = gradients(dense, IDS)
    found = model(IDS[:, :-1], IDS[:, 1:])
    found.backward()
    torch.testing.assert_close(found.detach(), loss)
    choosing = [block.choosing.layer for block in model.blocks]
    assert all(layer.loss > 0 and layer.index_q.weight.grad.any() for layer in choosing)
    others = dict(model.named_parameters())
    for name, parameter in dense.named_parameters():
        torch.testing.assert_close(others[name].grad, parameter.grad, atol=1e-5, rtol=1e-3)
    model.eval()
    model(IDS[:, :-1], IDS[:, 1:]).backward()


@pytest.mark.parametrize(("pattern", "kv_heads"), [("msa", None), ("nsa", None), ("msa", 1)])
def test_a_dense_model_is_continued_with_chosen_blocks(tmp_path, pattern, kv_heads):
    store = tokens(tmp_path)
    Run(tiny(kv_heads=kv_heads), store, tmp_path / "dense").train()
    config = tiny(pattern=pattern, kv_heads=kv_heads, window=64, initial=str(tmp_path / "dense"), seed=1)
    run = Run(config, store, tmp_path / pattern)
    before, _, _ = model_in(tmp_path / "dense", torch.device("cpu"))
    own = run.model.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in before.state_dict().items())
    assert {name.split(".")[2] for name in own.keys() - before.state_dict().keys()} == {"choosing"}
    ids = IDS % 257
    if pattern == "msa":
        run.model.eval()
        torch.testing.assert_close(run.model.scores(ids[:, :64], 63), before.scores(ids[:, :64], 63))
    metrics = run.train()
    assert metrics["initial"]["pattern"] == "dense" and metrics["val_loss"] < metrics["first_loss"]
    after, _, _ = model_in(tmp_path / pattern, torch.device("cpu"))
    changed = [name for name, tensor in after.state_dict().items() if not torch.equal(tensor, own[name].cpu())]
    assert changed == [] and len(after.state_dict()) == len(own)
    with pytest.raises(ValueError, match="must hold a model of this run's depth, width"):
        Run(tiny(initial=str(tmp_path / pattern)), store, tmp_path / "back")
    other = tiny(kv_heads=1 if kv_heads is None else None, initial=str(tmp_path / "dense"))
    with pytest.raises(ValueError, match="head_dim, kv_heads, vocabulary"):
        Run(other, store, tmp_path / "other")


@pytest.mark.parametrize("pattern", ["local,moba", "msa", "nsa"])
def test_a_run_pauses_resumes_and_is_opened(tmp_path, pattern):
    store = tokens(tmp_path)
    config = tiny(pattern=pattern)
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
        ({"recompute": True}, "recompute must be False if blocks are chosen"),
        ({"recorded": True}, "recorded must be False if blocks are chosen"),
        ({"context_parallel": 2}, "context_parallel must be 1 if blocks are chosen"),
        ({"compiled": "model"}, "compiled must be none or block if blocks are chosen"),
        ({"attention": "sdpa"}, "attention must be sparseflash if blocks are chosen"),
    ],
)
def test_what_no_chosen_blocks_can_do_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        configure("124M", {"pattern": "local,moba", **changes})
