import copy
import io

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from sparseflash import nn, selection
from sparseflash.selection.cache import SelectionCache
from sparseflash.selection.frame import packing_of
from tests.selection.layers import DIM, INDEXED, KINDS, WIDTH, example_of, filled, sequence

VIDEO = (2, 5, 9)


def video_layer(**options):
    return filled(selection.VideoSparseAttention(WIDTH, 4, 2, head_dim=DIM, cube=(1, 4, 4), chosen=2, **options), 0)


@pytest.fixture
def compiling():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def run(layer, x, pull, *how, **options):
    x = x.clone().requires_grad_()
    out = layer(x, *how, **options)
    loss = getattr(layer, "loss", None)
    ((out * pull).sum() + (0.0 if loss is None else loss)).backward()
    grads = {name: p.grad for name, p in layer.named_parameters()} | {"x": x.grad}
    layer.zero_grad(set_to_none=True)
    return {"out": out.detach(), **grads} | ({} if loss is None else {"loss": loss.detach()})


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_compiled_into_one_graph_with_its_loss_and_gradients(kind, compiling):
    layer, x, pull = example_of(kind), sequence(100, 1), sequence(100, 2)
    want = run(layer, x, pull)
    layer.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(layer, x, pull), want, rtol=1e-8, atol=1e-9)


def test_a_video_layer_is_compiled(compiling):
    layer, x, pull = video_layer(), sequence(90, 1), sequence(90, 2)
    want = run(layer, x, pull, VIDEO)
    layer.compile(backend="aot_eager")
    torch.testing.assert_close(run(layer, x, pull, VIDEO), want, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_may_be_compiled(kind, compiling):
    layer, x, pull = example_of(kind), sequence(100, 1), sequence(100, 2)
    sums = torch.tensor([0, 37, 100], dtype=torch.int32)
    want = run(layer, x, pull, cu_seqlens=sums)
    layer.compile(backend="eager")
    torch.testing.assert_close(run(layer, x, pull, cu_seqlens=sums), want, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("backend", ["triton", "blockwise", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_backend_computes_the_same(kind, backend):
    if kind in ("TokenSelection", "SpanSelection") and backend == "triton":
        pytest.skip("interpreted for minutes")
    layer, x = example_of(kind).float().eval(), sequence(60, 1).float()
    want = layer(x)
    layer.backend = backend
    torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        cache = layer.new_cache(1, 60)
        outs = [layer(part, cache=cache) for part in x.split([58, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(outs, 1), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*KINDS, "VideoSparseAttention"])
def test_layers_run_in_low_precision_and_keep_their_dtype(kind, dtype):
    layer = (video_layer() if kind == "VideoSparseAttention" else example_of(kind)).to(dtype)
    x, how = sequence(90, 1).to(dtype), (VIDEO,) if kind == "VideoSparseAttention" else ()
    found = run(layer, x, x, *how)
    assert found["out"].dtype == dtype and all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("kind", [*KINDS, "VideoSparseAttention"])
def test_layers_run_under_autocast(kind):
    how = (VIDEO,) if kind == "VideoSparseAttention" else ()
    layer = (video_layer(qk_norm=True) if how else example_of(kind, qk_norm=True)).float()
    x = sequence(90, 1).float()
    with torch.autocast("cpu", torch.bfloat16):
        found = run(layer, x, x, *how)
    assert found["out"].dtype == torch.bfloat16 and all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("kind", [*KINDS, "VideoSparseAttention"])
def test_a_layer_is_copied_saved_and_loaded(kind):
    how = (VIDEO,) if kind == "VideoSparseAttention" else ()
    layer = (video_layer() if how else example_of(kind)).eval()
    x = sequence(90, 1)
    want = layer(x, *how)
    assert torch.equal(copy.deepcopy(layer)(x, *how), want)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    other = (video_layer() if how else example_of(kind)).eval()
    filled(other, 5)
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    assert torch.equal(other(x, *how), want) and repr(layer).startswith(f"{kind}(\n  24, 4 heads of 16")


@pytest.mark.parametrize("kind", INDEXED)
def test_a_layer_is_copied_after_a_step_of_training(kind):
    layer, x = example_of(kind), sequence(90, 1)
    (layer(x).sum() + layer.loss).backward()
    for copied in (copy.deepcopy(layer), torch.optim.swa_utils.AveragedModel(layer).module):
        assert copied.loss is None and torch.equal(copied.eval()(x), layer(x))
    assert layer.loss.requires_grad


@pytest.mark.parametrize("kind", INDEXED)
def test_a_loss_is_of_the_last_call(kind):
    layer, x = example_of(kind), sequence(90, 1).requires_grad_()
    layer(x)
    with torch.no_grad():
        layer(x)
    assert layer.loss is None
    layer(x)
    checkpoint(layer, x, use_reentrant=True)  # computes without gradients, and again in the backward
    assert layer.loss is None
    layer(x)
    layer(x[:, :0])
    assert layer.loss == 0.0
    layer(x)
    layer.eval()(x)
    assert layer.loss is None


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_in_gives_nothing_out(kind):
    layer = example_of(kind)
    assert layer(sequence(0, 0, batch=2)).shape == (2, 0, WIDTH)
    for none in ([0, 0], [0]):
        assert layer(sequence(0, 0), cu_seqlens=none).shape == (1, 0, WIDTH)
    out = layer(sequence(7, 0), cu_seqlens=[0, 0, 7, 7])
    torch.testing.assert_close(out, layer(sequence(7, 0)))
    for batch, tokens in ((0, 40), (2, 0)):
        _check_gradients_of_nothing(layer, sequence(tokens, 0, batch=batch))


def _check_gradients_of_nothing(layer, x, *how):
    """Ranks of DistributedDataParallel wait for gradients of all parameters."""
    layer.zero_grad()
    out = layer(x.requires_grad_(), *how)
    assert out.shape == x.shape
    out.sum().backward()
    assert x.grad.shape == x.shape and all(not each.grad.any() for each in layer.parameters())


def test_no_videos_give_nothing():
    layer = video_layer()
    _check_gradients_of_nothing(layer, sequence(128, 0, batch=0), (4, 4, 8))


@pytest.mark.parametrize("kind", [*KINDS, "VideoSparseAttention"])
def test_shapes_of_a_layer_are_known_on_the_meta_device(kind):
    layer, how = (video_layer(), ((4, 4, 8),)) if kind == "VideoSparseAttention" else (example_of(kind), ())
    x = torch.empty(2, 128, WIDTH, dtype=torch.float64, device="meta", requires_grad=True)
    out = layer.to("meta")(x, *how)
    out.sum().backward()
    assert out.shape == x.shape == x.grad.shape and out.is_meta


@pytest.mark.parametrize("kind", INDEXED)
def test_a_query_without_anything_to_teach_adds_nothing_to_the_loss(kind):
    layer = example_of(kind)
    layer(sequence(1, 0))
    assert layer.loss == 0.0
    layer.loss.backward()
    assert all(p.grad is None or not p.grad.isnan().any() for p in layer.parameters())


def test_the_room_between_documents_is_zero_and_taken_out_again():
    packing = packing_of([0, 3, 3, 5], 4, 5, torch.device("cpu"))
    x = torch.arange(1.0, 6.0).view(1, 5, 1)
    assert packing.spread(x).flatten().tolist() == [1, 2, 3, 0, 4, 5, 0, 0]
    assert torch.equal(packing.collect(packing.spread(x)), x) and packing.stops == (4, 4, 8)


def test_a_failed_call_leaves_the_cache_as_it_was(monkeypatch):
    layer, x = example_of("MixtureOfBlocks").eval(), sequence(40, 1)
    with torch.no_grad():
        cache = layer.new_cache(1, 50)
        layer(x, cache=cache)
        monkeypatch.setattr(type(layer), "choice", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            layer(x[:, :1], cache=cache)
    assert cache.length == 40


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("NativeSparseAttention", {"block": 24}, "block must be a power of two from 16 to 256 tokens; got 24."),
        ("NativeSparseAttention", {"stride": 12}, "stride must divide block and compression, 64 and 32 tokens; got 12"),
        ("NativeSparseAttention", {"chosen": 2}, r"chosen must be at least first \+ last, 1 and 2 blocks; got 2."),
        ("NativeSparseAttention", {"window": 0}, "window must be at least 1; got 0."),
        ("MixtureOfBlocks", {"block": 8192}, "block must be a power of two from 16 to 4096 tokens; got 8192."),
        ("MixtureOfBlocks", {"chosen": 0}, "chosen must be at least 1; got 0."),
        ("BlockSelection", {"chosen": 1, "first": 1}, r"chosen must be at least first \+ 1, 1 and the query's own"),
        ("BlockSelection", {"first": -1}, r"chosen must be at least first \+ 1, -1 and"),
        ("BlockSelection", {"teach": "all"}, "teach must be 'visible' or 'chosen'; got 'all'."),
        ("TokenSelection", {"taught": 0}, "taught must be at least 1; got 0."),
        ("SpanSelection", {"span": 3}, "span must be a power of two from 1 to 256 tokens; got 3."),
        ("VideoSparseAttention", {"cube": (3, 3, 3)}, "cube must have a power of two from 16 to 256 tokens; got"),
        ("VideoSparseAttention", {"cube": 4}, "cube must be three numbers, frames, rows and columns; got 4."),
        ("MixtureOfBlocks", {"rotary": nn.Rotary(8)}, "rotary must be for heads of 16 features; it is for 8."),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(selection, kind)(WIDTH, 4, 2, head_dim=DIM, **options)


@pytest.mark.parametrize("kind", ["NativeSparseAttention", "BlockSelection"])
@pytest.mark.parametrize("first", [1.5, None, "a", True, torch.nan])
def test_numbers_of_blocks_are_integers(kind, first):
    with pytest.raises(TypeError, match="first must be an integer number of blocks; got "):
        getattr(selection, kind)(WIDTH, 4, 2, head_dim=DIM, first=first)


def test_arguments_that_a_layer_does_not_have_are_refused_with_what_to_do():
    with pytest.raises(TypeError, match=r"rotary must be Rotary or None; got Rotary2D\."):
        selection.MixtureOfBlocks(WIDTH, 4, rotary=nn.Rotary2D(16, 4), head_dim=DIM)
    layer, x = example_of("MixtureOfBlocks"), sequence(40, 1)
    for name, remedy in (
        ("mask", "it chooses its keys itself. Use nn.SparseSelfAttention with a mask"),
        (
            "scores",
            "it has no score modifications. Use nn.SparseSelfAttention, or the functions of masks and attention",
        ),
        ("lengths", "pack the sequences one behind the other, and pass cu_seqlens, their running sums"),
        ("positions", "positions are counted from the beginning of each sequence"),
        ("is_causal", "it is always causal"),
    ):
        with pytest.raises(TypeError, match=f"{name} must not be given to MixtureOfBlocks: {remedy}"):
            layer(x, **{name: None})
    with pytest.raises(TypeError, match="unexpected keyword argument 'others'"):
        layer(x, others=1)
    with pytest.raises(ValueError, match=r"x must have shape \[1, tokens, 24\] with cu_seqlens; got \[2, 40, 24\]"):
        layer(sequence(40, 1, batch=2), cu_seqlens=[0, 40])
    with pytest.raises(ValueError, match="cu_seqlens must end with the number of tokens of x, 40; got 30"):
        layer(x, cu_seqlens=[0, 30])
    cache = layer.new_cache(1, 50)
    with pytest.raises(ValueError, match="cache must not be given with cu_seqlens; got both"):
        layer(x, cache=cache, cu_seqlens=[0, 40])
    with pytest.raises(ValueError, match=r"cache must be used for inference, without gradients: call layer\.eval"):
        layer(x, cache=cache)
    with pytest.raises(TypeError, match=r"cache must be a SelectionCache, as layer\.new_cache makes it; got KVCache"):
        layer(x, cache=nn.KVCache(1, 2, 50, 16))
    assert isinstance(cache, SelectionCache) and cache.length == 0
    wide = SelectionCache(1, 2, 10, 16, 8, {})
    with pytest.raises(ValueError, match=r"k and v must have shape \[1, 2, N, 16\] and \[1, 2, N, 8\] to be added"):
        wide.append(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16))


def test_a_video_layer_refuses_what_it_does_not_have():
    layer, x = video_layer(), sequence(90, 1)
    with pytest.raises(ValueError, match=r"shape must have as many tokens as x, 90; got \[\(2, 5, 8\)\], 80 tokens"):
        layer(x, (2, 5, 8))
    with pytest.raises(
        ValueError, match=r"shape must have as many tokens as x, 90; got .* and texts of \[3\], 93 tokens"
    ):
        layer(x, VIDEO, text=3)
    for text in ([3, 4], -1):
        with pytest.raises(ValueError, match=r"text must be the tokens of text before each of 1 videos; got "):
            layer(x, VIDEO, text=text)
    for text in (3.9, [3.9], True, "3"):
        with pytest.raises(TypeError, match="text must be an integer number of tokens; got "):
            layer(x, VIDEO, text=text)
    with pytest.raises(ValueError, match="shape must be three numbers, frames, rows and columns; got 90"):
        layer(x, 90)
    with pytest.raises(ValueError, match=r"shape must be three numbers, frames, rows and columns; got \(90, 1\)"):
        layer(x, [(90, 1)])
    for name, remedy in (
        ("cache", "its attention is not causal, so no token follows another"),
        ("cu_seqlens", "pass shape=, a list of the frames, rows and columns of each video"),
        ("mask", "it chooses its keys itself. Use nn.SparseSelfAttention with a mask"),
        ("scores", "it has no score modifications. Use masks.pooled_scores, masks.top_k_blocks and attention"),
    ):
        with pytest.raises(TypeError, match=f"{name} must not be given to VideoSparseAttention: {remedy}"):
            layer(x, VIDEO, **{name: None})


def test_gates_of_a_video_begin_with_the_fine_stage_alone():
    layer = selection.VideoSparseAttention(WIDTH, 4, 2, head_dim=DIM, cube=(1, 4, 4), chosen=12).double()
    x = sequence(90, 1)
    q, k, v = layer.split(layer.qkv(x), 4, 2, 2)
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(layer(x, VIDEO), layer.out(dense.transpose(1, 2).flatten(2)))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 2), (32, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_computes_what_the_cpu_does_and_repeats_to_the_bit(kind, heads):
    layer, x, pull = example_of(kind, *heads).float(), sequence(300, 1).float(), sequence(300, 2).float()
    want = run(layer, x, pull)
    layer, x, pull = layer.cuda(), x.cuda(), pull.cuda()
    found, again = run(layer, x, pull), run(layer, x, pull)
    for name, value in found.items():
        assert torch.equal(value, again[name])
        torch.testing.assert_close(value.cpu(), want[name], rtol=2e-3, atol=2e-3)
    packed = layer(x, cu_seqlens=[0, 120, 300])
    torch.testing.assert_close(packed, torch.cat([layer(x[:, :120]), layer(x[:, 120:])], 1), rtol=2e-3, atol=2e-3)
    with torch.no_grad():
        whole, cache = layer.eval()(x), layer.new_cache(1, 320)
        outs = [layer(part, cache=cache) for part in x.split([297, 1, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_trains_a_layer_in_half_precision_at_the_papers_sizes(kind):
    layer = getattr(selection, kind)(512, 16, 1, head_dim=64, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1, 4096, 512, device="cuda", dtype=torch.bfloat16)
    found, again = run(layer, x, x), run(layer, x, x)
    assert all(value.isfinite().all() and torch.equal(value, again[name]) for name, value in found.items())


def test_a_video_is_trained_after_inference():
    layer, x = video_layer(), sequence(5 + 72, 1)
    with torch.inference_mode():
        want = layer(x, (2, 4, 9), text=5)
    got = layer(x, (2, 4, 9), text=5)
    got.sum().backward()
    assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("text", [0, 21])
def test_a_gpu_computes_a_video(text):
    layer, x, pull = video_layer().float(), sequence(text + 90, 1).float(), sequence(text + 90, 2).float()
    want = run(layer, x, pull, VIDEO, text=text)
    found = run(layer.cuda(), x.cuda(), pull.cuda(), VIDEO, text=text)
    for name, value in found.items():
        torch.testing.assert_close(value.cpu(), want[name], rtol=2e-3, atol=2e-3)
