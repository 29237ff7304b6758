import numpy as np
import pytest
import torch

from sparseflash import BlockMask, attention, masks
from sparseflash.nn import SparseSelfAttention
from sparseflash.pattern import mask_of_lengths

N = 40
WINDOW, WINDOWS, SHIFT, TENSOR, ARRAY = 3, [3, 5], {"left": 3}, torch.tensor([3, 5]), np.array([3, 5])


class Settings:
    shared = 3

    def __init__(self, window):
        self.window = window


SETTINGS = Settings(3)
LIVE = torch.tensor(True)


def set_global(name, value):
    globals()[name] = value


def of_global(q, k):
    return (q - k).abs() < WINDOW


def within(q, k):
    return k <= q and of_global(q, k) if isinstance(q, int) else (k <= q) & of_global(q, k)


def closure():
    window = 3

    def rule(q, k):
        return (q - k).abs() < window

    def change(value):
        nonlocal window
        window = value

    return rule, change


def default():
    def rule(q, k, window=3):
        return (q - k).abs() < window

    def change(value):
        rule.__defaults__ = (value,)

    return rule, change


def keyword_default():
    def rule(q, k, *, window=3):
        return (q - k).abs() < window

    return rule, lambda value: rule.__kwdefaults__.update(window=value)


CHANGES = {
    "a global number": lambda: (of_global, lambda value: set_global("WINDOW", value)),
    "a global number in a function that it calls": lambda: (within, lambda value: set_global("WINDOW", value)),
    "a global list": lambda: (lambda q, k: q - k < WINDOWS[0], lambda value: WINDOWS.__setitem__(0, value)),
    "a global list, whole": lambda: (
        lambda q, k: q - k < sum(WINDOWS),
        lambda value: set_global("WINDOWS", [value, 1]),
    ),
    "a global dictionary": lambda: (lambda q, k: q - k < SHIFT["left"], lambda value: SHIFT.update(left=value)),
    "an attribute of a global object": lambda: (
        lambda q, k: q - k < SETTINGS.window,
        lambda value: setattr(SETTINGS, "window", value),
    ),
    "an attribute of a class": lambda: (
        lambda q, k: q - k < Settings.shared,
        lambda value: setattr(Settings, "shared", value),
    ),
    "a global object, replaced": lambda: (
        lambda q, k: q - k < SETTINGS.window * 1.0,
        lambda value: set_global("SETTINGS", Settings(value)),
    ),
    "a closure variable": closure,
    "a default argument": default,
    "a default of a keyword": keyword_default,
    "whether a global number is large": lambda: (
        lambda q, k: k <= q if WINDOW > 6 else q <= k,
        lambda value: set_global("WINDOW", value),
    ),
}
VALUES = (3, 5, 9, 4, 3, 12)


@pytest.fixture(autouse=True)
def same_globals():
    yield
    globals().update(WINDOW=3, WINDOWS=[3, 5], SHIFT={"left": 3}, SETTINGS=Settings(3))
    Settings.shared = 3
    torch._dynamo.reset()


def compiled_graphs(function, **options):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, **options), graphs


def assert_follows(mask_of, change, fullgraph=True):
    q = torch.randn(1, 1, N, 16, dtype=torch.float64)
    function = lambda q: attention(q, q, q, mask_of())  # noqa: E731
    compiled, graphs = compiled_graphs(function, fullgraph=fullgraph)
    for value in VALUES:
        change(value)
        assert torch.equal(compiled(q), function(q)), value
    return graphs


@pytest.mark.parametrize("name", CHANGES)
def test_a_mask_follows_the_numbers_that_its_rule_reads(name):
    rule, change = CHANGES[name]()
    graphs = assert_follows(lambda: BlockMask.from_function(rule, N, block=16), change)
    assert len(graphs) <= len(set(VALUES))


# Every way of reading is drawn above; rules in other places are tried with each kind of reading once.
@pytest.mark.parametrize(
    "name", ["a global number", "an attribute of a global object", "a closure variable", "a default argument"]
)
def test_a_mask_follows_the_numbers_of_a_rule_of_heads_of_candidates_and_of_a_pattern(name):
    rule, change = CHANGES[name]()
    change(3)
    of_heads = lambda b, h, q, k: rule(q, k) | (q == k + h)  # noqa: E731
    assert_follows(lambda: BlockMask.from_function(of_heads, N, heads=1, block=16), change)
    assert_follows(
        lambda: BlockMask.from_function(lambda q, k: k <= q, 16 * N, block=16, candidates=rule).crop(
            q=(15 * N, 16 * N), k=(15 * N, 16 * N)
        ),
        change,
    )
    assert_follows(lambda: mask_of_lengths(rule, N, N, block=16), change)


def test_a_mask_follows_a_pattern_of_lengths():
    assert_follows(
        lambda: mask_of_lengths(lambda n: masks.local(n, window=WINDOW, block=16), N, N),
        lambda value: set_global("WINDOW", value),
    )
    layer = SparseSelfAttention(16, 1, lambda n: masks.local(n, window=WINDOW, block=16))
    compiled, _ = compiled_graphs(layer)
    x = torch.randn(2, N, 16)
    for value in VALUES:
        set_global("WINDOW", value)
        layer_now = SparseSelfAttention(16, 1, masks.local(N, window=value, block=16))
        layer_now.load_state_dict(layer.state_dict())
        torch.testing.assert_close(compiled(x), layer_now(x))


def test_a_number_that_the_compiler_left_open_is_closed():
    def function(q, window):
        return attention(q, q, q, BlockMask.from_function(lambda q, k: (q - k).abs() < SETTINGS.window, N)) * window

    compiled, _ = compiled_graphs(function, dynamic=True)
    q = torch.randn(1, 1, N, 16, dtype=torch.float64)
    for value in VALUES:
        SETTINGS.window = value
        assert torch.equal(compiled(q, value), function(q, value))


TENSORS = {
    "a global tensor": lambda q, k: (q - k).abs() < TENSOR[0],
    "all of a global tensor": lambda q, k: (q == TENSOR).any() | (k <= q),
    "a default": lambda q, k, own=TENSOR: (q - k).abs() < own[1],
    "no operation": lambda q, k: LIVE,
    "an array": lambda q, k: (q - k).abs() < torch.from_numpy(ARRAY)[0],
}


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("name", TENSORS)
def test_a_rule_that_reads_a_tensor_is_refused_by_name(name, fullgraph):
    q = torch.randn(1, 1, N, 16)
    compiled, _ = compiled_graphs(
        lambda q: attention(q, q, q, BlockMask.from_function(TENSORS[name], N, block=16)), fullgraph=fullgraph
    )
    with pytest.raises(Exception, match=r"BlockMask\.from_function must be given rules that read no tensors .* reads "):
        compiled(q)


def test_a_tensor_is_refused_by_its_name():
    compiled, _ = compiled_graphs(lambda: BlockMask.from_function(lambda q, k: q - k < TENSOR[1], N).indices + 1)
    with pytest.raises(Exception, match=r"got a rule that reads G\['TENSOR'\]\. Build the mask outside"):
        compiled()


@pytest.mark.parametrize(
    ("fullgraph", "text"), [(True, "Unsupported|item|data-dependent"), (False, "rules that torch.compile can trace")]
)
def test_a_rule_that_cannot_be_traced_does_not_become_stale(fullgraph, text):
    def rule(b, h, q, k):
        return (q - k).abs() < [WINDOW, 5][int(h)]

    q = torch.randn(1, 1, N, 16)
    compiled, _ = compiled_graphs(
        lambda q: attention(q, q, q, BlockMask.from_function(rule, N, heads=1, block=16)), fullgraph=fullgraph
    )
    with pytest.raises(Exception, match=text):
        compiled(q)


def test_the_device_on_which_a_compiled_rule_is_asked_is_a_constant():
    assert_follows(
        lambda: BlockMask.from_function(lambda q, k: k <= q + q.new_ones(()), N, block=16, device="cpu"),
        lambda value: None,
    )
