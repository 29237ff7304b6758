from collections import Counter
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from experiments.lm import generate
from experiments.lm.cli import app
from experiments.lm.model.attention import attention_over
from experiments.lm.model.remembered import cast_weights, next_scores, put_row, remembered
from experiments.lm.model.transformer import LanguageModel, Sizes
from experiments.lm.patterns import of_layers
from experiments.lm.sample import opened
from experiments.lm.train import Run
from experiments.measurements import read
from sparseflash.nn import kv_cache
from tests.experiments.lm.models import model_of, tiny, tokens

DEVICE = torch.device("cuda")
IDS = torch.randint(300, (2, 64), generator=torch.Generator().manual_seed(1))
PATTERNS = ["dense", "local", "local,dense", "moba", "msa", "nsa", "local,msa"]


def caches(model, pattern, batch):
    patterns = (pattern.split(",") * 2)[:2]
    return remembered(model, patterns, batch, 64, window=32, block=16)


@pytest.mark.parametrize(("positions", "kv_heads"), [("rotary", None), ("learned", None), ("rotary", 1)])
@pytest.mark.parametrize("pattern", PATTERNS)
@torch.no_grad()
def test_with_a_cache_the_scores_are_those_of_all_tokens_together(pattern, positions, kv_heads):
    """Also where each sequence of the batch got its prompt alone, and over several blocks of new tokens."""
    model = model_of(pattern, "sparseflash", positions=positions, kv_heads=kv_heads).eval()
    whole = caches(model, pattern, 2)
    for row in range(2):
        one = caches(model, pattern, 1)
        scores = next_scores(model, IDS[row : row + 1, :21], one)
        torch.testing.assert_close(scores, model.scores(IDS[row : row + 1], 20)[:, :300], atol=1e-5, rtol=1e-4)
        put_row(whole, row, one)
    for place in range(21, 64):
        scores = next_scores(model, IDS[:, place : place + 1], whole)
        if place % 16 in (0, 5, 15):
            torch.testing.assert_close(scores, model.scores(IDS, place)[:, :300], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("pattern", "turns"), [("dense", 1), ("msa", 2)])
@torch.no_grad()
def test_a_token_computes_angles_and_places_once_for_all_layers(pattern, turns):
    """And rotates queries and keys at once, an indexer's too."""
    found = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            found[function.overloadpacket.__name__] += 1
            found["products"] += function.overloadpacket.__name__ == "mul" and out.shape[-3:] == (2, 2, 16)
            return out

    model = model_of(pattern, "sparseflash", depth=3).eval()
    cached = remembered(model, [pattern] * 3, 2, 64, window=32, block=16)
    next_scores(model, IDS[:, :21], cached)
    with Counting(), mock.patch.object(kv_cache, "next_places", side_effect=AssertionError):
        next_scores(model, IDS[:, 21:22], cached)
    assert found["cos"] == found["sin"] == 1 and found["products"] == 3 * turns


@pytest.mark.parametrize("pattern", ["dense", "msa", "nsa"])
@torch.no_grad()
def test_casting_the_matrices_once_keeps_the_bits(pattern):
    model = model_of(pattern, "sparseflash").eval()
    model.dtype = torch.bfloat16
    found = []
    for _ in range(2):
        cached = caches(model, pattern, 2)
        found.append([next_scores(model, ids, cached) for ids in (IDS[:, :21], IDS[:, 21:22], IDS[:, 22:23])])
        cast_weights(model)
    kept = {name for name, x in model.named_parameters() if x.dtype != torch.bfloat16}
    assert all("index_norm" in name for name in kept) and len(kept) == (4 if pattern == "msa" else 0)
    assert all(map(torch.equal, *found))


def test_the_likeliest_tokens_are_chosen_one_after_the_other(tmp_path):
    store = tokens(tmp_path)
    config = tiny(pattern="msa", context=64)
    Run(config, store, tmp_path / "run").train()
    model, config, _ = opened(tmp_path / "run", torch.device("cpu"))
    found = generate.measured(model, config, store.val, 2, 40, 6)
    for row, begin in enumerate((0, (len(store.val) - 40) // 2)):
        ids = torch.from_numpy(store.val.tokens[begin : begin + 40].astype("int64"))[None]
        for token in found.tokens[row][:-1]:
            padded = torch.nn.functional.pad(ids, (0, 64 - ids.shape[1]))
            assert int(model.scores(padded, ids.shape[1] - 1).argmax()) == token
            ids = torch.cat([ids, torch.tensor([[token]])], 1)
    assert len(found.tokens[0]) == generate.WARM + 6 and found.token_seconds > 0 and found.prompt_seconds > 0


def test_the_command_measures_and_records(tmp_path):
    store = tokens(tmp_path)
    Run(tiny(pattern="local,dense", steps=2), store, tmp_path / "run").train()
    words = ["generate", str(tmp_path / "run"), "--data", str(store.folder), "--batch", "1", "--batch", "3"]
    words += ["--tokens", "2", "--device", "cpu", "--commit", "abc", "--record", str(tmp_path / "r.jsonl")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    run, found = read(tmp_path / "r.jsonl")
    assert run.commit == "abc" and "experiments.lm" in run.command
    names = [
        f"lm/generate/{batch}x64/{what}/64-local-then-dense" for batch in (1, 3) for what in ("tokens", "prompt-tokens")
    ]
    assert [each.name for each in found] == names and all(each.value > 0 for each in found)


def test_learned_positions_end_with_the_context(tmp_path):
    store = tokens(tmp_path)
    Run(tiny(positions="learned", steps=1), store, tmp_path / "run").train()
    words = ["generate", str(tmp_path / "run"), "--data", str(store.folder), "--batch", "1", "--device", "cpu"]
    result = CliRunner().invoke(app, [*words, "--tokens", "2"])
    assert result.exit_code == 0 and f"1 x {64 - generate.WARM - 2} tokens" in result.output, result.output
    result = CliRunner().invoke(app, [*words, "--tokens", str(64 - generate.WARM)])
    assert result.exit_code == 2
    assert "tokens must be less than 60, because learned positions end with the context; got 60" in result.output


def test_other_patterns_are_refused(tmp_path):
    store = tokens(tmp_path)
    Run(tiny(pattern="butterfly", steps=1), store, tmp_path / "run").train()
    result = CliRunner().invoke(
        app, ["generate", str(tmp_path / "run"), "--data", str(store.folder), "--device", "cpu"]
    )
    assert result.exit_code == 2
    words = " ".join(result.output.split())
    assert "patterns must be dense, local or of chosen blocks to generate with a cache; got butterfly" in words


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("pattern", "dtype"),
    [*((pattern, torch.bfloat16) for pattern in ("dense", "local", "moba", "msa")), ("nsa", torch.float32)],
)
@torch.no_grad()
def test_on_a_gpu_the_cache_gives_the_scores_of_all_tokens_together(pattern, dtype):
    """Compared on average, because a rounding of bf16 may choose another block; NSA chooses too few blocks for that."""
    sizes = Sizes(2, 256, 128, 300, 1024)
    layers = of_layers(pattern, 2, sizes.heads, 1024, window=256, block=64)
    torch.manual_seed(0)
    attentions = [attention_over(each.to(DEVICE), "sparseflash") for each in layers]
    model = LanguageModel(sizes, attentions, dtype=dtype).to(DEVICE).eval()
    ids = torch.randint(300, (2, 1024), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    kept = remembered(model, [pattern] * 2, 2, 1024, window=256, block=64)
    found, expected = [next_scores(model, ids[:, :1000], kept)], [model.scores(ids, 999)[:, :300]]
    for place in range(1000, 1024):
        found.append(next_scores(model, ids[:, place : place + 1], kept))
        expected.append(model.scores(ids, place)[:, :300])
    off, size = ((torch.stack(found) - torch.stack(expected)).abs().mean(), torch.stack(expected).abs().mean())
    assert off < 0.02 * size, (off, size)
