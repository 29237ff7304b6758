import inspect
import re

import pytest
import torch

from sparseflash import masks

LENGTHS = ("q_len", "k_len", "lengths", "k_lengths", "shape", "height", "width")
DATA = ("scores", "indices", "masks", "mask", "q", "k")
FAMILIES = [name for name in masks.__all__ if name != "order"]


def parameters(name):
    return inspect.signature(getattr(masks, name)).parameters.values()


@pytest.mark.parametrize("name", FAMILIES)
def test_only_lengths_and_data_are_given_by_position(name):
    positional = [p.name for p in parameters(name) if p.kind is not p.KEYWORD_ONLY]
    allowed = DATA if positional[0] in DATA else LENGTHS
    assert set(positional) <= set(allowed)


@pytest.mark.parametrize("name", FAMILIES)
def test_more_by_position_is_an_error_that_names_the_keywords(name):
    build, positional = getattr(masks, name), [p for p in parameters(name) if p.kind is not p.KEYWORD_ONLY]
    named = [p.name for p in parameters(name) if p.kind is p.KEYWORD_ONLY]
    with pytest.raises(TypeError, match=f"got {len(positional) + 1} by position") as error:
        build(*[64] * (len(positional) + 1))
    assert all(f"{each}=" in str(error.value) for each in named)
    with pytest.raises(TypeError, match=r"by (name \(.*|position); got nonsense=\.$") as error:
        build(*[64] * len(positional), nonsense=64)
    assert all(f"{each}=" in str(error.value) for each in named)


def test_a_second_length_is_the_number_of_keys_in_every_family():
    for build in (
        masks.dense, masks.causal, lambda *n: masks.local(*n, window=4096, causal=True),
        lambda *n: masks.streaming(*n, window=4096, sink=0), lambda *n: masks.prefix_lm(*n, prefix=0),
    ):  # fmt: skip
        assert build(1, 4096) == masks.dense(1, 4096)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("local(4096, 256)", "local must have window=, .*a window goes by name: local(4096, window=256)."),
        ("local(4096, 4096, 256)", "given q_len and k_len by position and the rest by name (window=, causal=,"),
        ("chunked(4096, 512)", "chunked must be given q_len by position and the rest by name (chunk=, causal="),
        ("a_shape(4096, 128, 1024)", "(sink=, local=, block=); got 3 by position"),
        ("streaming(4096, 512, 4)", "(window=, sink=, offset=, block=); got 3 by position"),
        ("streaming(4096, 512)", "missing 2 required keyword-only arguments: 'window' and 'sink'"),
        ("prefix_lm(4096, 1024)", "missing 1 required keyword-only argument: 'prefix'"),
        ("top_k_blocks(None, 8, q_len=4096)", "given scores by position and the rest by name (k=, q_len=,"),
        ("per_head(dense(4), dense(4))", "given masks by position; got 2 by position. Pass one list of them."),
        ("documents(100, 200, 50)", "got 3 by position. Pass one list of them."),
        ("documents(cu_seqlens=[0, 9])", "From running sums take the differences, cu_seqlens.diff()"),
        ("causal(64, block_size=64)", "; got block_size=. The size of a tile is called block."),
        ("neighborhood((64, 64), 13)", "given shape by position and the rest by name (window=, stride=,"),
    ],
)
def test_what_was_given_by_position_once_says_its_name(call, message):
    with pytest.raises(TypeError, match=re.escape(message).replace(r"\.\*", ".*")):
        eval(call, vars(masks))


NEEDED = {
    "antidiagonal_scores": ((torch.zeros(1, 1, 64, 16),) * 2, {}),
    "chunked": ((64,), {"chunk": 16}),
    "dilated": ((64,), {"window": 8, "dilation": 2}),
    "documents": (([20, 44],), {}),
    "local": ((64,), {"window": 8}),
    "longformer": ((64,), {"window": 8, "global_tokens": [0]}),
    "mass_blocks": ((torch.zeros(1, 1),), {"mass": 0.5, "q_len": 64}),
    "neighborhood": (((8, 8),), {"window": 3}),
    "random_blocks": ((64,), {"count": 1}),
    "select_blocks": ((torch.zeros(1, 1, 64, 16),) * 2, {"top_k": 1}),
    "selected_keys": ((torch.zeros(1, 1, 64, 1, dtype=torch.int64),), {"k_len": 64}),
    "top_k_blocks": ((torch.zeros(1, 1),), {"k": 1, "q_len": 64}),
    "top_k_keys": ((torch.zeros(64, 64),), {"k": 1, "k_len": 64}),
    "with_text": ((masks.dense(64),), {"text": 16}),
}  # fmt: skip
FLAGS = [(name, p.name) for name in FAMILIES for p in parameters(name) if isinstance(p.default, bool)]


@pytest.mark.parametrize(("name", "flag"), FLAGS)
@pytest.mark.parametrize("value", [1, "yes", None, torch.ones(3), torch.tensor(True)], ids=type)
def test_flags_are_true_or_false(name, flag, value):
    positional, named = NEEDED.get(name, ((512,), {}))
    kind, words = (ValueError, "a bool, or one for") if name == "neighborhood" else (TypeError, "True or False; got")
    with pytest.raises(kind, match=f"{flag} must be {words}"):
        getattr(masks, name)(*positional, **named, **{flag: value})
    assert getattr(masks, name)(*positional, **named, **{flag: True}) is not None


def test_help_shows_the_signature_and_the_definition():
    assert str(inspect.signature(masks.causal)).startswith("(q_len: 'int', k_len: 'int | None' = None, *, offset")
    assert masks.causal.__name__ == "causal" and "k <= q + offset" in masks.causal.__doc__
