import pytest
import torch
from hypothesis import given
from torch._subclasses.fake_tensor import FakeTensorMode

from sparseflash import BlockMask, clear_caches, masks
from sparseflash.blockmask.cache import SMALL_MASK
from sparseflash.blockmask.methods import conversion
from tests.drawn.masks import block_masks

META = torch.device("meta")


@pytest.fixture(autouse=True)
def shared_on_meta(monkeypatch):
    monkeypatch.setattr(conversion, "_SHARING", ["meta"])
    clear_caches()


def made_anew(mask):
    arrays = [None if x is None else x.clone() for x in mask._arrays()]
    return BlockMask(*mask._numbers(), *arrays)


@given(block_masks(40), block_masks(40))
def test_masks_share_their_arrays_if_and_only_if_they_are_equal(first, second):
    moved = [mask.bake_lengths().to("meta") for mask in (first, made_anew(first), second)]
    assert moved[0].indices is moved[1].indices
    assert (moved[2].indices is moved[0].indices) == (first.bake_lengths() == second.bake_lengths())


def test_arrays_of_the_same_bytes_are_not_taken_for_the_same_mask():
    rows, cols = ([torch.arange(2), torch.arange(2)] for _ in range(2))
    of_heads = BlockMask.from_layout(torch.eye(2, dtype=torch.bool).repeat(3, 1, 1), block=16)
    of_batch = BlockMask(*of_heads._numbers(), *of_heads._arrays()[:4], of_heads.pattern.view(-1, 1))
    longer = BlockMask.from_tiles(rows[0], cols[0], q_len=32, k_len=48, block=16)
    moved = [mask.to("meta") for mask in (of_heads, of_batch, longer)]
    assert len({id(mask.indices) for mask in moved}) == 3
    assert [mask.shape for mask in moved] == [mask.shape for mask in (of_heads, of_batch, longer)]


def test_lengths_are_those_of_each_mask():
    mask = masks.causal(100, block=16)
    padded = [mask.with_lengths(lengths).to("meta") for lengths in ([50], [70, 80])]
    assert [tuple(each.lengths.shape) for each in padded] == [(2, 1), (2, 2)]
    assert padded[0].indices is padded[1].indices is mask.to("meta").indices
    assert mask.to("meta").lengths is None


def test_large_and_dynamic_masks_are_moved_each_time():
    large = masks.butterfly(1 << 17, block=16)
    assert large.nbytes > SMALL_MASK
    dynamic = masks.top_k_blocks(torch.rand(4, 4), k=2, q_len=64, block=16)
    for mask in (large, dynamic):
        assert mask.to("meta").indices is not mask.to("meta").indices


def test_few_masks_are_kept_until_the_caches_are_cleared():
    for tokens in range(1, 3 * conversion._shared.most):
        masks.causal(tokens, block=16).to("meta")
        assert len(conversion._shared) <= conversion._shared.most
    clear_caches()
    assert not conversion._shared


def test_fake_masks_are_not_kept():
    mask = masks.causal(100, block=16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        mask.to("meta")
    assert not conversion._shared


def test_a_mask_first_moved_in_inference_mode_may_be_used_in_training():
    mask = masks.causal(100, block=16)
    with torch.inference_mode():
        mask.to("meta")
    assert not any(x.is_inference() for x in mask.to("meta")._arrays() if x is not None)


@pytest.mark.gpu
def test_they_hold_the_same_scores_on_every_stream(monkeypatch):
    monkeypatch.setattr(conversion, "_SHARING", ["cuda"])
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for number in range(40):
        mask = masks.local(500, window=1 + number % 7, block=16)
        with torch.cuda.stream(streams[number % 2]):
            busy = torch.randn(2000, 2000, device="cuda")
            busy @ busy
            moved = mask.to("cuda")
            again = masks.local(500, window=1 + number % 7, block=16).to("cuda")
            assert again.indices is moved.indices and moved.to("cpu") == mask
