"""Patterns that another library defines, against that library's own code.

Skipped where the library is not installed; later versions of xformers and DeepSpeed have dropped the tested code:

    pip install --no-deps --no-build-isolation natten==0.21.7 xformers==0.0.22 deepspeed==0.16.5
"""

import importlib.util
import itertools
import sys
import types
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, masks


def source(package, path):
    """A module run by itself: importing its package would build or need more."""
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"{package} is not installed")
    file = Path(found.submodule_search_locations[0], path)
    if not file.exists():
        pytest.skip(f"this version of {package} has no {path}")
    name = ".".join([package, *Path(path).with_suffix("").parts])
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------- NATTEN


@pytest.fixture(scope="module")
def natten():
    return pytest.importorskip("natten.backends.flex", reason="natten is not installed")


@st.composite
def neighborhoods(draw):
    shape = draw(st.sampled_from([(40,), (9, 13), (16, 12), (5, 6, 7)]))
    options = []
    for side in shape:
        window = draw(st.integers(2, side))
        dilation = draw(st.integers(1, side // window))
        options.append((window, draw(st.integers(1, window)), dilation, draw(st.booleans())))
    return shape, *zip(*options)


@given(neighborhoods())
def test_neighborhood_is_nattens(natten, drawn):
    shape, window, stride, dilation, causal = drawn
    theirs = natten.get_na_flex_mask("cpu", len(shape), shape, window, stride, dilation, causal)
    count = torch.Size(shape).numel()
    q, k = torch.arange(count)[:, None], torch.arange(count)[None, :]
    live = theirs.mask_mod(0, 0, q, k)
    mask = masks.neighborhood(shape, window=window, stride=stride, dilation=dilation, causal=causal, block=16)
    assert mask == BlockMask.from_dense(live, block=16)


# ---------------------------------------------------------------------- xformers


@pytest.fixture
def xformers(monkeypatch):
    name = "xformers.components.attention.sparsity_config"
    monkeypatch.setitem(sys.modules, name, source("xformers", "components/attention/sparsity_config.py"))
    return source("xformers", "components/attention/attention_patterns.py")


@pytest.mark.filterwarnings("ignore:torch.meshgrid")
@pytest.mark.parametrize(("shape", "window"), [((8, 12), 4), ((15, 10), 5), ((6, 6), 6), ((9, 3), 1)])
def test_swin_is_xformers(xformers, shape, window):
    for shift in range(window):
        live = xformers.swin_attention_pattern(*shape, window, shift_size=shift)
        assert masks.swin(shape, window=window, shift=shift, block=16) == BlockMask.from_dense(live, block=16)


@pytest.mark.filterwarnings("ignore:torch.meshgrid")
@pytest.mark.parametrize("shape", [(8, 12), (15, 10), (1, 40), (3, 4, 5)])
def test_axial_is_xformers(xformers, shape):
    live = xformers.axial_nd_pattern(*shape)
    assert masks.axial(shape, block=16) == BlockMask.from_dense(live, block=16)


@pytest.mark.filterwarnings("ignore:torch.meshgrid")
@pytest.mark.parametrize("shape", [(8, 12), (15, 10), (1, 40)])
@pytest.mark.parametrize("dilation", [1, 2, 3, 5])
def test_dilated_grid_is_xformers(xformers, shape, dilation):
    live = xformers.dilated_2d_pattern(*shape, k=dilation)
    assert masks.dilated_grid(shape, dilation=dilation, block=16) == BlockMask.from_dense(live, block=16)


@pytest.mark.filterwarnings("ignore:torch.meshgrid")
@pytest.mark.parametrize("distance", [1, 2, 4])
def test_a_cropped_odd_window_is_xformers_with_the_maximum_norm(xformers, distance):
    live = xformers.local_2d_pattern(9, 12, distance, p=float("inf"))
    mask = masks.neighborhood((9, 12), window=2 * distance - 1, edges="crop", block=16)
    assert mask == BlockMask.from_dense(live, block=16)


# ---------------------------------------------------------------------- DeepSpeed


@pytest.fixture(
    params=[
        ("deepspeed", "ops/sparse_attention/sparsity_config.py", "block"),
        ("xformers", "components/attention/sparsity_config.py", "block_size"),
    ],
    ids=lambda p: p[0],
)
def bigbird_config(request):
    package, path, block = request.param
    module = source(package, path)
    return module, lambda size, **options: module.BigBirdSparsityConfig(**options | {block: size})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("window", "first"), [(1, 1), (3, 1), (4, 2), (5, 3), (1, 9)])
@pytest.mark.parametrize("different", [False, True])
def test_deepspeed_bigbird_is_deepspeeds(bigbird_config, monkeypatch, causal, window, first, different):
    module, config = bigbird_config
    blocks, heads, count = 9, 3, 1
    ours = masks.deepspeed_bigbird(
        16 * blocks,
        random_blocks=count,
        window_blocks=0,
        global_blocks=0,
        heads=heads if different else 1,
        causal=causal,
        seed=3,
        block=16,
    )
    drawn = iter([ours.indices[a:b].tolist() for a, b in itertools.pairwise(ours.indptr.tolist())])
    sample = types.SimpleNamespace(sample=lambda population, k: next(drawn))
    monkeypatch.setattr(module, "random", sample)
    theirs = config(
        16, num_heads=heads, different_layout_per_head=different, num_random_blocks=count,
        num_sliding_window_blocks=window, num_global_blocks=first,
        attention="unidirectional" if causal else "bidirectional",
    ).make_layout(16 * blocks).bool()  # fmt: skip
    live = theirs.repeat_interleave(16, 1).repeat_interleave(16, 2)
    mask = masks.deepspeed_bigbird(
        16 * blocks,
        random_blocks=count,
        window_blocks=window,
        global_blocks=first,
        heads=heads if different else 1,
        causal=causal,
        seed=3,
        block=16,
    )
    expected = BlockMask.from_dense(live.tril() if causal else live, block=16)
    assert torch.equal(mask.to_dense().expand(1, heads, -1, -1), expected.to_dense())


def test_deepspeed_bigbird_draws_where_theirs_does_not(bigbird_config):
    _, config = bigbird_config
    # Their causal draw of two from one block fails; ours takes the one.
    theirs = config(16, num_heads=1, num_random_blocks=2, attention="unidirectional")
    with pytest.raises(ValueError, match=r"Sample larger than population"):
        theirs.make_layout(160)
    assert masks.deepspeed_bigbird(160, random_blocks=2, causal=True, block=16).to_dense()[0, 0].diagonal().all()
