"""Small layers, drawn: of each kind, with the function of `papers` that it must equal."""

from unittest import mock

import torch
from hypothesis import strategies as st

from sparseflash import nn, selection
from tests.selection import papers

DIM, WIDTH = 16, 24
PAPERS = {
    "NativeSparseAttention": papers.native,
    "MixtureOfBlocks": papers.mixture,
    "BlockSelection": papers.blocks,
    "TokenSelection": papers.tokens,
    "SpanSelection": papers.spans,
}
KINDS = list(PAPERS)
INDEXED = KINDS[2:]


def filled(layer, seed):
    """The layer in fp64, with random weights; weights of norms stay near one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in layer.double().named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(
                1 + 0.2 * drawn if "norm" in name and "weight" in name else drawn * parameter.shape[-1] ** -0.5
            )
    return layer


def sequence(tokens, seed, batch=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, WIDTH, generator=generator, dtype=torch.float64)


def options_of(kind):
    common = {"chosen": st.integers(1, 4)}
    indexed = {**common, "index_dim": st.sampled_from([2, 6]), "teach": st.sampled_from(["visible", "chosen"])}
    return {
        "NativeSparseAttention": st.fixed_dictionaries(
            {
                "block": st.sampled_from([16, 32]), "chosen": st.integers(2, 4), "window": st.integers(1, 40),
                "first": st.integers(0, 1), "last": st.just(1),
                "value_dim": st.sampled_from([None, 24]),
                "stride": st.sampled_from([4, 8, 16]), "compression": st.sampled_from([16, 32]),
            }
        ),
        "MixtureOfBlocks": st.fixed_dictionaries({**common, "block": st.sampled_from([16, 32])}),
        "BlockSelection": st.fixed_dictionaries(
            {**indexed, "chosen": st.integers(2, 4), "block": st.sampled_from([16, 32]), "first": st.integers(0, 1)}
        ),
        "TokenSelection": st.fixed_dictionaries(
            {**indexed, "chosen": st.integers(1, 20), "index_heads": st.integers(1, 3)}
        ),
        "SpanSelection": st.fixed_dictionaries(
            {**indexed, "span": st.sampled_from([1, 4, 8]), "index_heads": st.integers(1, 3)}
        ),
    }[kind]  # fmt: skip


HEADS = st.sampled_from([(1, 1), (2, 1), (4, 2), (16, 1), (3, 3)])


@st.composite
def layers(draw, kind):
    heads, kv_heads = draw(HEADS)
    rotary = nn.Rotary(DIM) if draw(st.booleans()) else None
    scale = draw(st.sampled_from([None, 0.7]))
    options = draw(options_of(kind))
    made = getattr(selection, kind)(
        WIDTH, heads, kv_heads, head_dim=DIM, rotary=rotary, scale=scale, bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()), **options,
    )  # fmt: skip
    return filled(made, draw(st.integers(0, 100)))


def example_of(kind, heads=4, kv_heads=2, **more):
    options = {
        "NativeSparseAttention": {"block": 16, "chosen": 3, "compression": 16, "stride": 8, "window": 20, "last": 1},
        "MixtureOfBlocks": {"block": 16, "chosen": 3},
        "BlockSelection": {"block": 16, "chosen": 3, "index_dim": 6},
        "TokenSelection": {"chosen": 9, "index_heads": 2, "index_dim": 6},
        "SpanSelection": {"chosen": 3, "index_heads": 2, "index_dim": 6},
    }[kind]
    return filled(getattr(selection, kind)(WIDTH, heads, kv_heads, head_dim=DIM, **options | more), 0)


def latent_layer(rotary=True, **more):
    """A layer with multi-head latent attention: 4 heads, keys of 18 features that hold values of 12."""
    options = {"chosen": 9, "index_heads": 2, "index_dim": 6} | more
    made = selection.TokenSelection(
        WIDTH, 4, latent=selection.Latent(12, 6, 5, 7, 10), rotary=nn.Rotary(6) if rotary else None, **options
    )
    return filled(made, 0)


def chosen_by(layer, x, **how):
    found = []
    kind = type(layer)
    real = kind.choice

    def watched(self, *args, **kwargs):
        found.append(real(self, *args, **kwargs))
        return found[-1]

    with mock.patch.object(kind, "choice", watched):
        out = layer(x, **how)
    (index,) = found
    n = index.shape[2]
    span = getattr(layer, "block", getattr(layer, "span", 1))
    live = (index.unsqueeze(4) == torch.arange(n) // span).any(3) & torch.ones(n, n, dtype=torch.bool).tril()
    return out, live.repeat_interleave(layer.num_heads // live.shape[1], 1)


def gradients(layer, x, out, loss, pull):
    total = (out * pull).sum() + (0.0 if loss is None else loss)
    leaves = {"x": x, **dict(layer.named_parameters())}
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found))
