import re

import pytest
import torch

from sparseflash import masks

CAUSAL = {
    "prefix_lm": lambda n, **block: masks.prefix_lm(n, prefix=0, **block),
    "documents": lambda n, **block: masks.documents([n // 2, n - n // 2], causal=True, **block),
    "chunked": lambda n, **block: masks.chunked(n, chunk=37, causal=True, **block),
    "dilated": lambda n, **block: masks.dilated(n, window=20, dilation=3, causal=True, **block),
    "longformer": lambda n, **block: masks.longformer(
        n, window=9, global_tokens=[0, n // 2, n - 1], causal=True, **block
    ),
    "streaming": lambda n, **block: masks.streaming(n, window=11, sink=3, **block),
    "a_shape": lambda n, **block: masks.a_shape(n, sink=3, local=11, **block),
    "tri_shape": lambda n, **block: masks.tri_shape(n, sink=3, local=11, last=20, **block),
    "vertical_slash": lambda n, **block: masks.vertical_slash(
        n, vertical=[0, n // 2, n - 1], slash=[0, n // 3], **block
    ),
    "strided": lambda n, **block: masks.strided(n, stride=12, **block),
    "fixed": lambda n, **block: masks.fixed(n, stride=12, summary=3, heads=3, num_verts=2, **block),
    "log_sparse": lambda n, **block: masks.log_sparse(n, window=3, restart=50, **block),
}
CAUSAL_IN_BLOCKS = {
    "butterfly": lambda n, **block: masks.butterfly(n, causal=True, radix=3, global_blocks=2, **block),
    "butterfly, layer": lambda n, **block: masks.butterfly(n, causal=True, layer=1, **block),
    "deepspeed_fixed": lambda n, **block: masks.deepspeed_fixed(n, causal=True, global_blocks=2, **block),
    "hierarchical": lambda n, **block: masks.hierarchical(n, causal=True, **block),
}
SYMMETRIC = {
    "dense": masks.dense,
    "documents": lambda n, **block: masks.documents([n // 2, n - n // 2], **block),
    "chunked": lambda n, **block: masks.chunked(n, chunk=37, **block),
    "dilated": lambda n, **block: masks.dilated(n, window=20, dilation=3, **block),
    "longformer": lambda n, **block: masks.longformer(n, window=9, global_tokens=2, **block),
    "butterfly_2d": lambda n, **block: masks.butterfly_2d(n, 3, **block),
}


@pytest.mark.parametrize("name", CAUSAL | CAUSAL_IN_BLOCKS)
@pytest.mark.parametrize("q_len", [1, 31, 32, 33, 150])
def test_causal_patterns_never_see_the_future(name, q_len):
    build = (CAUSAL | CAUSAL_IN_BLOCKS)[name]
    assert not build(q_len, block=16).to_dense().triu(1).any()


@pytest.mark.parametrize("name", SYMMETRIC)
@pytest.mark.parametrize("q_len", [1, 31, 33, 150])
def test_bidirectional_patterns_are_symmetric(name, q_len):
    dense = SYMMETRIC[name](q_len, block=16).to_dense()
    assert torch.equal(dense, dense.mT)


@pytest.mark.parametrize("name", CAUSAL | SYMMETRIC)
def test_patterns_on_tokens_hold_the_same_scores_in_every_block(name):
    build = (SYMMETRIC | CAUSAL)[name]
    assert torch.equal(build(133, block=(16, 64)).to_dense(), build(133, block=(128, 32)).to_dense())


@pytest.mark.parametrize("name", sorted((SYMMETRIC | CAUSAL).keys() - {"documents", "butterfly_2d"}))
def test_patterns_refuse_lengths_and_blocks_that_are_none(name):
    build = (SYMMETRIC | CAUSAL)[name]
    with pytest.raises(ValueError, match="block must be one of"):
        build(100, block=24)
    with pytest.raises(ValueError, match=r"q_len must be between 1 and 2\^31 - 257 tokens; got -7"):
        build(-7, block=16)


@pytest.mark.parametrize("name", CAUSAL_IN_BLOCKS)
def test_patterns_on_blocks_refuse_rectangular_ones(name):
    with pytest.raises(TypeError, match=r"block must be an int \(.* blocks are square\); got \(16, 32\)"):
        CAUSAL_IN_BLOCKS[name](100, block=(16, 32))


REFUSED = [
    ("prefix_lm(100, prefix=-1)", "prefix must be at least 0 tokens; got -1"),
    ("chunked(100, chunk=0)", "chunk must be at least 1 token; got 0"),
    ("local(100)", "local must have window=, or left= and right=; got none of them."),
    ("local(100, left=3)", "local must have either window or both of left and right, without causal"),
    ("local(100, window=5, right=3)", "got window=5, causal=False, left=None, right=3"),
    ("local(100, left=3, right=0, causal=True)", "without causal (right=0 is causal); got"),
    ("local(100, left=-1, right=0)", "left must be at least 0 keys; got -1"),
    ("local(100, left=1, right=-1)", "right must be at least 0 keys; got -1"),
    ("dilated(100, window=0, dilation=1)", "window must be at least 1 key; got 0"),
    ("dilated(100, window=3, dilation=0)", "dilation must be at least 1 token; got 0"),
    ("longformer(100, window=0, global_tokens=1)", "window must be at least 1 key; got 0"),
    ("longformer(100, window=3, global_tokens=-1)", "global_tokens must be at least 0 tokens; got -1"),
    ("longformer(100, window=3, global_tokens=[4, 100])", "global_tokens must lie in 0..99; got 4..100"),
    ("longformer(100, window=3, global_tokens=1.5)", "global_tokens must be an integer number of tokens; got 1.5"),
    (
        "longformer(100, window=3, global_tokens=[1.5])",
        "global_tokens must be a list of integers; got torch.float32 of shape [1]",
    ),
    ("longformer(100, window=3, global_tokens=[1, [2]])", "global_tokens must be a list of integers; got [1, [2]]"),
    ("streaming(100, window=0, sink=1)", "window must be at least 1 key; got 0"),
    ("streaming(100, window=1, sink=-1)", "sink must be at least 0 keys; got -1"),
    ("a_shape(100, sink=-1, local=3)", "sink must be at least 0 keys; got -1"),
    ("a_shape(100, sink=1, local=-1)", "local must be at least 0 keys; got -1"),
    ("tri_shape(100, sink=1, local=1, last=-1)", "last must be at least 0 queries; got -1"),
    ("strided(100, stride=0)", "stride must be at least 1 token; got 0"),
    ("strided(100, stride=5, attend='all')", "attend must be one of 'both', 'local', 'strided'; got 'all'"),
    ("fixed(100, stride=5, summary=0)", "summary must be at least 1 token; got 0"),
    (
        "fixed(100, stride=5, summary=1, attend='strided')",
        "attend must be one of 'both', 'local', 'summary'; got 'strided'",
    ),
    ("fixed(100, stride=5, summary=3, num_verts=2)", "num_verts * summary must not exceed stride, 5 tokens; got 2 * 3"),
    ("fixed(100, stride=5, summary=3, heads=0)", "heads must be at least 1 head; got 0"),
    ("fixed(100, stride=5, summary=3, num_verts=0)", "num_verts must be at least 1 sub-block; got 0"),
    ("deepspeed_fixed(100, global_blocks=3)", "global_blocks must divide local_blocks, 4; got 3"),
    ("deepspeed_fixed(100, local_blocks=0)", "local_blocks must be at least 1 block; got 0"),
    (
        "deepspeed_fixed(100, global_blocks=2, global_patterns=3)",
        "global_patterns must be at most local_blocks // global_blocks, 2; got 3",
    ),
    (
        "deepspeed_fixed(100, causal=True, horizontal=True)",
        "horizontal must be False with causal; got True",
    ),
    ("log_sparse(100, window=0)", "window must be at least 1 key; got 0"),
    ("log_sparse(100, window=5, restart=4)", "restart must be at least 5 tokens; got 4"),
    ("hierarchical(160, levels=4, block=16)", "levels must lie between 0 and 3 for 10 blocks of 16; got 4"),
    ("hierarchical(160, levels=-1, block=16)", "levels must lie between 0 and 3 for 10 blocks of 16; got -1"),
    ("butterfly(100, radix=1)", "radix must be at least 2; got 1"),
    ("butterfly(100, strides=2)", "strides must be a list of integers; got torch.int64 of shape []"),
    ("butterfly(100, global_blocks=-1)", "global_blocks must be at least 0 blocks; got -1"),
    ("butterfly(100, layer=-1)", "layer must be at least 0 layers; got -1"),
    ("butterfly(100, block=16, strides=[3])", "strides must be among [1, 2, 4] for 7 blocks of 16, radix 2; got [3]"),
    ("butterfly(100, block=16, radix=3, strides=[9])", "strides must be among [1, 3] for 7 blocks of 16, radix 3"),
    ("butterfly(100, strides=[1], factors=1)", "factors must not be given beside strides; got factors=1 and"),
    ("butterfly_2d(0, 3)", "height must be at least 1 pixel; got 0"),
    ("butterfly_2d(3, 0)", "width must be at least 1 pixel; got 0"),
    ("butterfly_2d(3, 3, cell=0)", "cell must be at least 1 pixel; got 0"),
    ("butterfly_2d(3, 3, cell=(1, 2, 3))", "cell must be a number or a pair of them; got (1, 2, 3)"),
    ("butterfly_2d(3, 3, radix=1)", "radix must be at least 2; got 1"),
    ("butterfly_2d(8, 3, factors=3)", "factors must lie between 0 and 2 for 3 columns of cells; got 3"),
    ("butterfly_2d(8, 3, cell=3, factors=(3, 0))", "factors must lie between 0 and 2 for 3 rows of cells; got 3"),
    ("butterfly_2d(3, 3, factors=1.5)", "factors must be an integer number of strides; got 1.5"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[call for call, _ in REFUSED])
def test_patterns_refuse_numbers_that_make_no_sense(call, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        eval(f"masks.{call}", {"masks": masks})


@pytest.mark.parametrize("name", ["streaming", "tri_shape", "dilated", "strided", "butterfly", "deepspeed_fixed"])
def test_stored_bits_do_not_grow_with_the_length(name):
    build = (CAUSAL | CAUSAL_IN_BLOCKS)[name]
    assert len(build(2**14).bits) == len(build(2**11).bits)


MILLION = {
    "documents": lambda n: masks.documents([1000] * (n // 1000), causal=True),
    "chunked": lambda n: masks.chunked(n, chunk=4096),
    "local": lambda n: masks.local(n, left=4095, right=0),
    "dilated": lambda n: masks.dilated(n, window=512, dilation=8),
    "longformer": lambda n: masks.longformer(n, window=512, global_tokens=16),
    "streaming": lambda n: masks.streaming(n, window=4096, sink=4),
    "butterfly": lambda n: masks.butterfly(n, radix=4, global_blocks=4),
    "butterfly_2d": lambda n: masks.butterfly_2d(1024, n // 1024),
    "log_sparse": lambda n: masks.log_sparse(n, window=20),
    "hierarchical": lambda n: masks.hierarchical(n),
}


@pytest.mark.parametrize("name", MILLION)
def test_a_million_tokens_need_no_more_than_their_live_tiles(name):
    mask = MILLION[name](2**20)
    assert len(mask.tile) < 50 * 8192
    assert mask.nbytes < 16e6
