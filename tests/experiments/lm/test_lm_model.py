import re
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

from experiments.lm import flops, patterns
from experiments.lm.config import configure
from experiments.lm.model import attention as attentions
from experiments.lm.model import loss as losses
from experiments.lm.model import transformer
from experiments.lm.model.attention import IMPLEMENTATIONS, attention_over, is_dense_causal
from experiments.lm.model.fused_loss import fused_loss_and_gradient
from experiments.lm.model.transformer import LanguageModel, Sizes
from sparseflash import masks
from sparseflash.cli.pattern_text import groups
from tests.experiments.lm.models import gradients, model_of, tiny

IDS = torch.randint(300, (3, 65), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("positions", "kv_heads"), [("rotary", None), ("learned", None), ("rotary", 1)])
@pytest.mark.parametrize("pattern", ["dense", "local|butterfly", "local/dense,bigbird"])
def test_sparse_attention_gives_the_gradients_of_pytorchs(pattern, positions, kv_heads):
    sizes = {"positions": positions, "kv_heads": kv_heads}
    loss, ours = gradients(model_of(pattern, "sparseflash", **sizes), IDS)
    peer, theirs = gradients(model_of(pattern, "sdpa", **sizes), IDS)
    exact, right = gradients(model_of(pattern, "sdpa", dtype=torch.float64, **sizes).double(), IDS)
    assert abs(loss - exact) <= 2 * abs(peer - exact) + 1e-6
    assert (ours - right).norm() <= 2 * (theirs - right).norm()


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_heads_that_share_keys_are_heads_with_equal_keys(positions):
    grouped = model_of("dense", "sparseflash", positions=positions, kv_heads=1)
    alone = model_of("dense", "sparseflash", positions=positions)
    weights = grouped.state_dict()
    for name, weight in weights.items():
        if name.endswith("qkv.weight"):
            q, k, v = weight.split([64, 32, 32])
            weights[name] = torch.cat([q, k, k, v, v])
    alone.load_state_dict(weights)
    torch.testing.assert_close(grouped(IDS[:, :-1], IDS[:, 1:]), alone(IDS[:, :-1], IDS[:, 1:]))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mask", [masks.causal(64, block=16), masks.local(64, window=20, causal=True, block=16)])
@torch.no_grad()
def test_a_group_of_heads_reads_its_own_keys(mask, implementation):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, heads, 64, 16, generator=generator) for heads in (4, 2, 2))
    expected = F.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=mask.to_dense()
    )
    torch.testing.assert_close(attention_over(mask, implementation)(q, k, v), expected)


@pytest.mark.parametrize("compiling", ["block", "model"])
def test_compiled_models_compute_the_same_without_a_break_in_the_graph(compiling):
    """A break would raise: `compiled` asks for the whole graph."""
    loss, plain = gradients(model_of("local|butterfly", "sparseflash", depth=1), IDS)
    other, found = gradients(model_of("local|butterfly", "sparseflash", depth=1, compiling=compiling), IDS)
    torch.testing.assert_close(other, loss)
    torch.testing.assert_close(found, plain, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("compiling", ["block", "model"])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_nothing_that_is_compiled_adds_up_rows_by_index(monkeypatch, compiling, positions):
    """Inductor would use atomic additions."""
    names = set()

    def look(graph, inputs):
        names.update(node.target.name() for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=look, bw_compiler=look)
    monkeypatch.setattr(transformer, "compiled", partial(torch.compile, fullgraph=True, dynamic=False, backend=backend))
    torch._dynamo.reset()
    gradients(model_of("dense", "sdpa", positions=positions, compiling=compiling), IDS)
    assert "aten::native_layer_norm_backward" in names
    assert not [name for name in names if re.search("embedding|index_put|index_add|scatter", name)]


def test_layers_that_are_computed_again_have_the_same_bits_and_keep_their_inputs_alone():
    loss, expected = gradients(model_of("local,dense", "sparseflash"), IDS)
    again, found = gradients(model_of("local,dense", "sparseflash", recompute=True), IDS)
    assert torch.equal(again, loss) and torch.equal(found, expected)

    def kept(**more):
        counts = []
        for depth in (1, 3):
            tensors = {}
            model = model_of("dense", "sparseflash", depth=depth, **more)
            held = {parameter.data_ptr() for parameter in model.parameters()}

            def pack(x, tensors=tensors, held=held):
                if x.data_ptr() not in held:
                    tensors[x.data_ptr()] = x
                return x

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                model(IDS[:, :-1], IDS[:, 1:])
            counts.append(sum(x.numel() for x in tensors.values() if x.shape[0] == 192))
        return (counts[1] - counts[0]) / 2 / 192

    assert kept() > 8 * 64
    assert kept(recompute=True) <= 64


@pytest.mark.parametrize("pattern", ["dense", "local", "butterfly", "bigbird", "local|butterfly", "local/dense"])
def test_no_token_sees_later_ones(pattern):
    model = model_of(pattern, "sparseflash")
    changed = IDS.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % 300
    with torch.no_grad():
        before, after = (model(ids[:, :-1], IDS[:, 1:], each=True) for ids in (IDS, changed))
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])


@pytest.mark.parametrize("bytes_of_chunk", [2**30, 300 * 4 * 16, 300 * 4 * 7])
def test_the_loss_in_chunks_is_the_cross_entropy(monkeypatch, bytes_of_chunk):
    monkeypatch.setattr(losses, "CHUNK_BYTES", bytes_of_chunk)
    torch.manual_seed(2)
    features, weight = torch.randn(64, 32, requires_grad=True), torch.randn(300, 32, requires_grad=True)
    labels = torch.randint(300, (64,))
    parts = list(losses.chunks(features, weight))
    assert len(parts) == {2**30: 1, 300 * 4 * 16: 4, 300 * 4 * 7: 16}[bytes_of_chunk]
    found = losses.mean_loss(features, weight, labels)
    expected = F.cross_entropy(features @ weight.T, labels)
    torch.testing.assert_close(found, expected)
    for mine, right in zip(
        torch.autograd.grad(3 * found, (features, weight)), torch.autograd.grad(3 * expected, (features, weight))
    ):
        torch.testing.assert_close(mine, right)
    each = losses.token_losses(features, weight, labels)
    torch.testing.assert_close(each, F.cross_entropy(features @ weight.T, labels, reduction="none"))


def fused_is_plain(tokens, vocabulary, dtype, device):
    torch.manual_seed(3)
    logits = (4 * torch.randn(tokens, vocabulary, device=device)).to(dtype)
    labels = torch.randint(vocabulary, (tokens,), device=device)
    labels[:2] = torch.tensor([0, vocabulary - 1])
    truth = logits.double().requires_grad_()
    expected = F.cross_entropy(truth, labels, reduction="sum")
    (gradient,) = torch.autograd.grad(0.25 * expected, truth)
    plain, plain_gradient = losses.plain_loss_and_gradient(logits, labels, 0.25)
    found, found_gradient = fused_loss_and_gradient(logits.clone(), labels, 0.25)
    for mine, theirs, right in ((found, plain, expected.detach()), (found_gradient, plain_gradient, gradient)):
        assert mine.dtype == theirs.dtype
        ulp = torch.finfo(mine.dtype).eps * float(right.abs().max())
        assert float((mine - right).abs().max()) <= 2 * float((theirs - right).abs().max()) + ulp


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocabulary", [300, 8192, 20_001])
def test_the_fused_cross_entropy_is_the_plain_one(vocabulary, dtype):
    fused_is_plain(5, vocabulary, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [384, 50_304, 20_001])
def test_the_fused_cross_entropy_is_the_plain_one_on_a_gpu(vocabulary, dtype):
    fused_is_plain(700, vocabulary, dtype, "cuda")


def test_the_vocabulary_is_padded_and_no_padding_is_ever_chosen():
    model = model_of("dense", "sparseflash")
    assert model.embedding.weight.shape[0] == 384
    scores = model.scores(IDS[:, :64], 10)
    assert scores[:, 300:].isneginf().all() and scores[:, :300].isfinite().all()


def test_flops_count_weights_six_times_and_live_scores_twelve_times_the_head():
    """1 layer, width 64, 2 heads of 32, window 2 over 4 tokens: 7 live scores a head."""
    sizes = Sizes(1, 64, 32, 100, 4)
    weights = 64 * 192 + 64 * 64 + 64 * 256 + 256 * 64 + 128 * 64
    assert sizes.weights == weights
    live = flops.live_scores([masks.local(4, window=2, causal=True, block=16)], sizes.heads)
    assert live == 14
    assert flops.of_token(weights, 32, live, 4) == 6 * weights + 12 * 32 * 14 / 4


@pytest.mark.parametrize("kv_heads", [None, 1])
def test_products_of_a_model_are_those_that_the_formula_counts(kv_heads):
    """By PyTorch's own counter."""
    from torch.utils.flop_counter import FlopCounterMode

    sizes = Sizes(2, 64, 32, 300, 64, kv_heads=kv_heads)
    model = LanguageModel(sizes, [lambda q, k, v: q + v] * 2)
    ids = IDS[:1]
    with FlopCounterMode(display=False) as counter:
        model(ids[:, :-1], ids[:, 1:]).backward()
    assert counter.get_total_flops() == 64 * flops.of_token(sizes.weights, 32, 0, 64)


@pytest.mark.parametrize(("name", "millions"), [("124M", 124), ("350M", 354), ("760M", 757), ("1.3B", 1311)])
def test_presets_have_the_sizes_that_they_are_named_for(name, millions):
    sizes = configure(name, {"vocabulary": 50_257}).sizes
    assert sizes.padded_vocabulary == 50_304
    assert sizes.weights / 1e6 == pytest.approx(millions, rel=0.01)


def test_dense_causal_masks_are_recognised_in_any_block():
    assert is_dense_causal(masks.causal(100, block=16)) and is_dense_causal(masks.causal(100, block=128))
    assert not is_dense_causal(masks.local(100, window=99, causal=True, block=16))
    assert not is_dense_causal(masks.causal(100, block=16).with_lengths([50]))


def test_patterns_alternate_over_layers_and_divide_heads():
    first, second, third = patterns.of_layers("local/dense, butterfly", 3, 4, 256, window=32, block=32)
    assert first is third and first.shape[1] == 4 and second.shape[1] == 1
    by_head = [first.select(heads=head) for head in range(4)]
    assert by_head[0] == by_head[1] == masks.local(256, window=32, causal=True, block=32)
    assert by_head[2] == by_head[3] == masks.causal(256, block=32)


MINE = """
from sparseflash import masks

def rule(q, k):
    return (q - k).abs() <= 5

def by_head(b, h, q, k):
    return q - k <= 8 * h

def windows(n, *, block):
    return masks.local(n, window=21, block=block)
"""


def test_patterns_of_ones_own_and_of_the_library_by_layer_and_head(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "mine.py"
    path.write_text(MINE)
    monkeypatch.chdir(tmp_path)
    causal = masks.causal(96, block=16)

    def of(text):
        return patterns.of_layers(text, 2, 4, 96, window=32, block=16)

    near = masks.local(96, left=5, right=0, block=16)
    assert of("folder/mine.py:rule")[0] == of(f"{path}:rule")[0] == near  # and nothing after the query
    assert of("folder/mine.py:windows")[0] == masks.local(96, left=10, right=0, block=16)
    assert of("streaming(n, window=20, sink=4), causal")[0] == masks.streaming(96, window=20, sink=4, block=16)
    assert of("streaming(n, window=20, sink=4), causal")[1] == causal
    for text in ("dense/folder/mine.py:rule", f"dense/{path}:rule"):
        mask, _ = of(text)
        assert [mask.select(heads=head) for head in range(4)] == [causal, causal, near, near]
    mask, _ = of("folder/mine.py:rule/local(n, window=9)|butterfly")
    both = (masks.local(96, window=9, block=16) & causal) | masks.butterfly(96, causal=True, block=16)
    assert [mask.select(heads=head) for head in (0, 3)] == [near, both]
    mask, _ = of("dense/folder/mine.py:by_head")
    assert mask.select(heads=2) == masks.local(96, left=0, right=0, block=16)
    assert mask.select(heads=3) == masks.local(96, left=8, right=0, block=16)


def test_a_path_begins_where_there_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local").mkdir()
    names = patterns.NAMES
    assert groups("local/mine.py:rule", names) == ["local", "mine.py:rule"]
    (tmp_path / "local" / "mine.py").touch()
    assert groups("local/mine.py:rule/dense", names) == ["local/mine.py:rule", "dense"]
    assert groups("dense//no/mine.py:rule", names) == ["dense", "/no/mine.py:rule"]
    assert groups("a/b/mine.py:rule", names) == ["a/b/mine.py:rule"]
    assert groups("local/butterfly", names) == ["local", "butterfly"]
    (tmp_path / "mine.py").touch()
    assert groups("dense|local/mine.py:rule", names) == ["dense|local/mine.py:rule"]
    assert groups("local/mine.py:a|mine.py:b/dense", names) == ["local/mine.py:a|mine.py:b", "dense"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: patterns.build("round", 64, window=8, block=16), "the pattern must be dense, local, .*'round'"),
        (lambda: patterns.of_layer("dense/local", 3, 64, window=8, block=16), "must be a multiple of the 2 groups"),
        (lambda: attention_over(masks.causal(64), "fast"), "attention must be one of sparseflash, sdpa, flex"),
        (lambda: tiny(width=100), "width must be a multiple of head_dim; got width 100, head_dim 32"),
        (lambda: tiny(kv_heads=3), "kv_heads must divide the 2 heads; got 3: choose another --kv-heads"),
        (lambda: tiny(kv_heads=0), "kv_heads must be at least 1; got 0"),
        (lambda: tiny(positions="none"), "positions must be one of rotary, learned"),
        (lambda: configure("7B", {}), "the preset must be one of cpu, 10M, 124M"),
    ],
)
def test_errors_say_what_must_hold(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_sdpa_refuses_a_mask_that_would_take_gigabytes(monkeypatch):
    monkeypatch.setattr(attentions, "LONGEST_DENSE_MASK", 100)
    with pytest.raises(ValueError, match="choose --context 100 or less, --pattern dense"):
        attention_over(masks.local(128, window=16, causal=True, block=16), "sdpa")
    attention_over(masks.causal(128), "sdpa")
