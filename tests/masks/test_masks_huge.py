import pytest
import torch

from sparseflash import masks

PICKS = torch.tensor([[0]]).expand(40, 1)
SCORES = torch.arange(9.0).view(3, 3)

SATURATING = {
    "a_shape-sink": lambda n: masks.a_shape(40, sink=n, local=2, block=16),
    "a_shape-local": lambda n: masks.a_shape(40, sink=1, local=n, block=16),
    "butterfly-radix": lambda n: masks.butterfly(100, radix=n, block=16),
    "butterfly-radix-causal": lambda n: masks.butterfly(100, radix=n, causal=True, block=16),
    "butterfly-global_blocks": lambda n: masks.butterfly(100, global_blocks=n, block=16),
    "butterfly_2d-cell": lambda n: masks.butterfly_2d(5, 8, cell=n, block=16),
    "butterfly_2d-radix": lambda n: masks.butterfly_2d(5, 8, radix=n, block=16),
    "chunked": lambda n: masks.chunked(40, chunk=n, block=16),
    "chunked-causal": lambda n: masks.chunked(40, chunk=n, causal=True, block=16),
    "deepspeed_fixed": lambda n: masks.deepspeed_fixed(100, local_blocks=n, block=16),
    "deepspeed_fixed-global": lambda n: masks.deepspeed_fixed(100, local_blocks=n, global_blocks=n, block=16),
    "dilated-window": lambda n: masks.dilated(40, window=n, dilation=2, block=16),
    "dilated-dilation": lambda n: masks.dilated(40, window=3, dilation=n, block=16),
    "dilated_grid": lambda n: masks.dilated_grid((5, 8), dilation=n, block=16),
    "expander": lambda n: masks.expander(100, degree=n, block=16),
    "fixed-stride": lambda n: masks.fixed(40, stride=n, summary=2, block=16),
    "local-window": lambda n: masks.local(40, window=n, block=16),
    "local-left": lambda n: masks.local(40, left=n, right=n, block=16),
    "log_sparse-window": lambda n: masks.log_sparse(40, window=n, block=16),
    "log_sparse-restart": lambda n: masks.log_sparse(40, window=3, restart=n, block=16),
    "longformer-window": lambda n: masks.longformer(40, window=n, global_tokens=1, block=16),
    "longformer-global_tokens": lambda n: masks.longformer(40, window=3, global_tokens=n, block=16),
    "mass_blocks-sink_blocks": lambda n: masks.mass_blocks(SCORES, mass=0.1, q_len=40, sink_blocks=n, block=16),
    "mass_blocks-local_blocks": lambda n: masks.mass_blocks(SCORES, mass=0.1, q_len=40, local_blocks=n, block=16),
    "neighborhood-crop": lambda n: masks.neighborhood((5, 8), window=n, edges="crop", block=16),
    "neighborhood-stride": lambda n: masks.neighborhood((5, 8), window=n, stride=n, edges="crop", block=16),
    "neighborhood-dilation": lambda n: masks.neighborhood((5, 8), window=3, dilation=n, edges="crop", block=16),
    "prefix_lm": lambda n: masks.prefix_lm(40, prefix=n, block=16),
    "random_blocks": lambda n: masks.random_blocks(100, count=n, block=16),
    "selected_keys-span": lambda n: masks.selected_keys(PICKS, k_len=40, span=n, block=16),
    "streaming-window": lambda n: masks.streaming(40, window=n, sink=1, block=16),
    "streaming-sink": lambda n: masks.streaming(40, window=2, sink=n, block=16),
    "strided-local": lambda n: masks.strided(40, stride=n, attend="local", block=16),
    "strided": lambda n: masks.strided(40, stride=n, attend="strided", block=16),
    "swin": lambda n: masks.swin((5, 8), window=n, block=16),
    "top_k_blocks": lambda n: masks.top_k_blocks(SCORES, k=n, q_len=40, block=16),
    "top_k_keys": lambda n: masks.top_k_keys(SCORES.new_ones(40, 1), k=n, k_len=40, span=n, block=16),
    "tri_shape-last": lambda n: masks.tri_shape(40, sink=1, local=2, last=n, block=16),
}


@pytest.mark.parametrize("build", SATURATING.values(), ids=SATURATING)
@pytest.mark.parametrize("huge", [2**31, 2**62, 2**70], ids=lambda n: f"2^{n.bit_length() - 1}")
def test_a_number_beyond_every_length_means_what_a_large_one_means(build, huge):
    assert build(huge) == build(128)


def test_the_largest_int64_is_such_a_number():
    assert masks.mass_blocks(SCORES, mass=0.1, q_len=40, local_blocks=2**63 - 1, block=16).density == 1.0
    assert masks.chunked(40, chunk=2**63 - 1, block=16).density == 1.0
    assert masks.swin((5, 8), window=2**63 - 1, block=16).density == 1.0


def test_seeds_and_layers_are_used_as_they_are():
    build = masks.random_blocks
    assert build(1000, count=2, seed=2**41, block=16) != build(1000, count=2, seed=2**42, block=16)
    layers = [masks.butterfly(128, layer=layer, block=16) for layer in (2**70, 2**70 % 3, 2**70 % 3 + 1)]
    assert layers[0] == layers[1] != layers[2]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: masks.causal(40, offset=2**63),
            ValueError,
            r"offset must lie between -2\^31 and 2\^31 tokens; got",
        ),
        (lambda: masks.streaming(40, window=2, sink=1, offset=-(2**70)), ValueError, r"offset must lie between -2\^31"),
        (
            lambda: masks.random_blocks(40, count=1, heads=2**70),
            ValueError,
            r"heads must be at most 65536 heads; got",
        ),
        (
            lambda: masks.selected_keys(PICKS, k_len=40, group=2**31),
            ValueError,
            r"group must be at most 65536 query heads; got 2147483648",
        ),
        (lambda: masks.expander(40, degree=2**70 + 1), ValueError, r"degree must be even"),
        (lambda: masks.butterfly(40, layer=-1), ValueError, r"layer must be at least 0 layers; got -1"),
        (lambda: masks.random_blocks(40, count=1, seed=-1), ValueError, r"seed must be at least 0; got -1"),
        (lambda: masks.pooled_scores(*[torch.ones(1, 1, 40, 8)] * 2, scale=10**400), ValueError, r"scale must be fini"),
        (
            lambda: masks.antidiagonal_scores(*[torch.ones(1, 1, 40, 8)] * 2, scale="16"),
            TypeError,
            r"scale must be a number; got str",
        ),
    ],
)
def test_what_has_no_meaning_is_refused_with_a_reason(call, error, message):
    with pytest.raises(error, match=message):
        call()
