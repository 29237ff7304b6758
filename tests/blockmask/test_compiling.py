import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sparseflash import BlockMask, attention, clear_caches, masks
from sparseflash.blockmask import compiling, rules

LENGTHS = (64, 100, 130)


def tensors(length, batch=2):
    generator = torch.Generator().manual_seed(length)
    shape = (batch, 2, length, 16)
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def assert_same_compiled(mask_of, lengths=LENGTHS, dynamic=None, backend="eager"):
    def function(q, k, v):
        return attention(q, k, v, mask_of(q))

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
    for length in lengths:
        inputs = tensors(length)
        got, want = compiled(*inputs), function(*inputs)
        assert torch.equal(got, want), length
        assert all(map(torch.equal, *(torch.autograd.grad(out.square().sum(), inputs) for out in (got, want))))


def near(q, k):
    return (q - k).abs() < 9


FAMILIES = {
    "causal": lambda n: masks.causal(n),
    "local": lambda n: masks.local(n, window=n // 2, block=32),
    "butterfly": lambda n: masks.butterfly(n, block=16, causal=True),
    "documents": lambda n: masks.documents([n - 40, 30, 10], causal=True),
    "global tokens": lambda n: masks.longformer(n, window=5, global_tokens=[0, n - 1]),
    "columns of heads": lambda n: masks.vertical_slash(n, vertical=[[0], [3, n - 1]], slash=range(4)),
    "bigbird": lambda n: masks.bigbird(n, random_blocks=0, heads=2, block=16),
    "image": lambda n: masks.neighborhood((2, n // 2), window=(1, 3), edges="crop", block=(16, 32)),
    "fixed": lambda n: masks.fixed(n, stride=16, summary=4, heads=2, num_verts=2, block=16),
    "dense": lambda n: BlockMask.dense(n, block=32),
    "rule": lambda n: BlockMask.from_function(near, n, block=32),
    "lambda": lambda n: BlockMask.from_function(lambda q, k: k <= q, n, block=32),
    "rule of heads": lambda n: BlockMask.from_function(lambda b, h, q, k: k <= q + h, n, heads=2, block=32),
    "tiles": lambda n: BlockMask.from_tiles([0, 1, 1], [0, 1, 0], n, block=32),
    "per head": lambda n: masks.per_head([masks.causal(n), masks.local(n, window=7)]),
    "and, or": lambda n: masks.local(n, window=9) & masks.causal(n) | masks.butterfly(n),
    "xor, minus": lambda n: masks.dense(n) - (masks.causal(n) ^ masks.local(n, window=4)),
    "moved": lambda n: masks.causal(130).crop(q=(130 - n, 130), k=(0, n)).reblock(32).T.transpose(),
    "chosen": lambda n: masks.per_head([masks.causal(n), masks.dense(n)]).select(heads=[1, 0]),
    "permuted": lambda n: masks.causal(n).permute(list(range(n))[::-1]),
}


@pytest.mark.parametrize("build", FAMILIES.values(), ids=FAMILIES)
def test_a_mask_is_a_constant_for_each_length(build):
    assert_same_compiled(lambda q: build(q.shape[2]))


@pytest.mark.parametrize("name", ["causal", "local", "per head", "and, or"])
def test_lengths_that_are_dynamic_from_the_first_on_are_told_apart(name):
    assert_same_compiled(lambda q: FAMILIES[name](q.shape[2]), dynamic=True)


def test_it_is_a_constant_of_the_backward_graph_too():
    assert_same_compiled(lambda q: masks.causal(q.shape[2]) & masks.local(q.shape[2], window=9), backend="aot_eager")


def test_it_is_built_once_for_each_length(monkeypatch):
    built, build = [], rules.tiles_of_rule
    where = "sparseflash.blockmask.methods.construction.tiles_of_rule"
    monkeypatch.setattr(where, lambda *given: (built.append(0), build(*given))[1])

    def rule(q, k):
        return k <= q

    @torch.compile(fullgraph=True, backend="eager")
    def function(q, k, v):
        return attention(q, k, v, BlockMask.from_function(rule, q.shape[2]))

    torch._dynamo.reset()
    for length in (64, 64, 100, 64, 100):
        function(*tensors(length))
    assert len(built) == 2


def test_a_mask_from_outside_may_be_combined_and_another_one_is_told_apart():
    class Layer(nn.Module):
        def __init__(self, mask):
            super().__init__()
            self.mask = mask

        def forward(self, q, k, v):
            return attention(q, k, v, self.mask & masks.causal(q.shape[2]))

    torch._dynamo.reset()
    layer, inputs = Layer(masks.dense(64)), tensors(64)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*inputs), attention(*inputs, masks.causal(64)))
    layer.mask = masks.local(64, window=5)
    assert torch.equal(compiled(*inputs), attention(*inputs, masks.local(64, window=3, causal=True)))


def test_lengths_of_sequences_may_come_last():
    lengths = torch.tensor([30, 64])
    assert_same_compiled(lambda q: masks.causal(q.shape[2]).to(q.device).with_lengths(lengths), lengths=(64, 70, 64))


def test_its_copy_on_a_device_is_a_constant_and_a_mask_from_outside_is_moved_without_compiling_again():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=backend)
    def function(q, mask):
        made = masks.causal(q.shape[2]).to("meta", non_blocking=True)
        return q + hasattr(made, "_is_constant") + 2 * len(mask.to("meta").indices)

    torch._dynamo.reset()
    for mask in (masks.local(64, window=window, block=16) for window in (3, 5)):
        out = function(torch.zeros(1, 1, 64), mask)
        assert torch.equal(out, torch.full((1, 1, 64), 1.0 + 2 * len(mask.indices)))
    assert len(graphs) == 1


def test_a_mask_that_was_forgotten_is_built_again(monkeypatch):
    monkeypatch.setattr(compiling, "MOST_KEPT", 1)
    compiling.clear()
    assert_same_compiled(lambda q: masks.causal(q.shape[2]), lengths=(64, 100, 64, 100))
    assert len(vars(compiling._kept)) == 1


@pytest.mark.parametrize(
    ("mask_of", "message"),
    [
        (lambda q: BlockMask.from_dense(q[0, 0] > 0), r"BlockMask\.from_dense must be called outside of compiled code"),
        (
            lambda q: masks.neighborhood((8, 8), window=3, order=masks.order.morton((8, 8))),
            r"neighborhood must be called outside of compiled code if a tensor or array is among",
        ),
        (
            lambda q: masks.top_k_blocks(q[:, :, :4, :4], k=2, q_len=64, block=16) & masks.causal(64),
            r"BlockMask\.__and__ must be given masks that exist when torch\.compile compiles it",
        ),
        (
            lambda q: masks.causal(64).with_lengths(q[:, 0, 0, 0].long()) | masks.causal(64),
            r"BlockMask\.__or__ must be given masks that exist .* call with_lengths last\.",
        ),
        (
            lambda q: BlockMask.from_function(lambda a, b: q[0, 0, a, 0] > b, 64),
            r"closure cell to Python constant|BlockMask\.from_function must be given rules that read no tensors",
        ),
        (lambda q: masks.local(q.shape[2], window=0), "window must be at least 1 key; got 0"),
        (lambda q: masks.local(q.shape[2]), "local must have window=, or left= and right="),
    ],
)
def test_what_can_be_no_constant_says_so(mask_of, message):
    def function(q, k, v):
        return attention(q, k, v, mask_of(q))

    torch._dynamo.reset()
    with pytest.raises(Exception, match=message):
        torch.compile(function, fullgraph=True, backend="eager")(*tensors(64))


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


@pytest.mark.parametrize("build", FAMILIES.values(), ids=FAMILIES)
def test_a_mask_that_is_built_in_what_is_exported_is_a_constant(build):
    q, k, v = (x.detach() for x in tensors(64))
    exported = torch.export.export(Calls(lambda q, k, v: attention(q, k, v, build(q.shape[2]))), (q, k, v))
    for inputs in ((q, k, v), (k, v, q)):
        assert torch.equal(exported.module()(*inputs), attention(*inputs, build(64)))


@pytest.mark.parametrize("build", FAMILIES.values(), ids=FAMILIES)
def test_a_mask_that_is_built_under_a_fake_mode_has_contents(build):
    with FakeTensorMode(allow_non_fake_inputs=True):
        mask, q = build(64), torch.empty(2, 2, 64, 16)
        assert attention(q, q, q, mask).shape == q.shape
        assert mask.to("meta").indices.shape == mask.indices.shape
    assert mask == build(64)


CHOSEN = {
    "top_k_blocks": lambda x: masks.top_k_blocks(x[:, :, ::16, ::16], k=2, q_len=64, block=16, causal=True),
    "mass_blocks": lambda x: masks.mass_blocks(x[:, :, ::16, ::16], mass=0.7, q_len=64, block=16),
    "from_block_index": lambda x: BlockMask.from_block_index(x[:, :, ::16, :2].long(), q_len=64, block=16, causal=True),
    "top_k_keys": lambda x: masks.top_k_keys(x, k=2, k_len=64, block=16, causal=True),
    "selected_keys": lambda x: masks.selected_keys(x[..., :2].long(), k_len=64, block=16),
}


@pytest.mark.parametrize("choose", CHOSEN.values(), ids=CHOSEN)
def test_a_choice_can_be_exported_and_run_on_fake_tensors_before_it_was_made_once(choose):
    q, x = torch.randn(1, 2, 64, 16), torch.rand(1, 2, 64, 64)
    clear_caches()
    exported = torch.export.export(Calls(lambda q, x: attention(q, q, q, choose(x))), (q, x))
    clear_caches()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert attention(*[torch.empty(1, 2, 64, 16)] * 3, choose(torch.empty(1, 2, 64, 64))).shape == q.shape
    other = 2 * x.flip(-1)
    assert torch.equal(exported.module()(q, other), attention(q, q, q, choose(other)))


@pytest.mark.parametrize(
    "mask_of",
    [
        lambda x, at: BlockMask.from_dense(x > 0),
        lambda x, at: BlockMask.from_layout(x[:1, :1] > 0),
        lambda x, at: BlockMask.from_function(lambda q, k: at[q] == at[k], 64),
        lambda x, at: BlockMask.from_function(lambda q, k: q >= k, 64, candidates=x[:1, :1] > 0),
        lambda x, at: BlockMask.from_tiles(at[:1], at[:1], 64),
        lambda x, at: masks.causal(64).permute(at),
        lambda x, at: masks.causal(64).with_lengths(at[:1]) & masks.causal(64),
        lambda x, at: masks.per_head([masks.causal(64).with_lengths(at[:1]), masks.causal(64)]),
        lambda x, at: masks.top_k_blocks(x[None, None, :4, :4], k=2, q_len=64, block=16) | masks.causal(64),
    ],
)
def test_what_can_be_no_constant_of_what_is_exported_says_so(mask_of):
    def function(x, at):
        q = x[None, None]
        return attention(q, q, q, mask_of(x, at))

    with pytest.raises((TypeError, ValueError), match=r"got a fake tensor(, | \()of torch\.export"):
        torch.export.export(Calls(function), (torch.randn(64, 64), torch.arange(64)))
