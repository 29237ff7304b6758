import pytest
import torch

from sparseflash import attention, masks, scores
from sparseflash.backends.triton.configs import Config
from sparseflash.backends.triton.overrides import Overrides, always_split, override, overrides
from sparseflash.backends.triton.schedule.tilings import Tiling
from tests.backends.triton.plans import kernels_of


def prepared(mask, dtype=torch.float16, dim=16, changes=None):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, mask.q_len, dim, generator=generator).to(dtype).requires_grad_() for _ in range(3))
    attention(q, k, v, mask, scores=changes, backend="triton").sum().backward()
    return kernels_of(mask)


@pytest.fixture
def mask():
    return masks.causal(64, block=32)


def test_a_configuration_is_that_of_its_kernel_alone_cut_down_to_the_tiles(mask):
    shipped = {name: kernel.choice.config for name, kernel in prepared(mask).items()}
    with override(configs={"dq": Config(16, 64, 1, 1)}):
        inside = {name: kernel.choice.config for name, kernel in prepared(mask).items()}
    assert inside == shipped | {"dq": Config(16, 32, 1, 1)} != shipped


def test_a_configuration_is_taken_as_it_is_also_where_scores_are_changed(mask):
    table = scores.relative(torch.randn(1, 9), scores.clipped(4))
    given = Config(16, 32, 2, 1, 168)
    with override(configs={"forward": given, "dq": given, "dk_dv": given}):
        inside = prepared(mask, dim=128, changes=table)
    assert {each.choice.config for each in inside.values()} == {given}


def test_all_that_can_be_chosen_is_what_runs_and_the_library_chooses_again_afterwards(mask):
    with override(tiling=lambda tilings: tilings[-1]), override(descriptors=False, splits=always_split(16)):
        inside = prepared(mask)
        assert all(each.choice.tiling.gathered == 32 for each in inside.values())
        assert not any(each.choice.descriptors for each in inside.values())
        assert prepared(masks.causal(256, block=32))["forward"].work.parts > 0
    after = prepared(mask)
    assert all(each.choice.tiling == Tiling(32, 32) and each.choice.descriptors for each in after.values())
    assert all(each.work.parts == 0 for each in after.values())


def test_fp32_can_be_multiplied_without_pieces(mask):
    assert all(each.choice.pieces for each in prepared(mask, torch.float32).values())
    with override(pieces=False):
        assert not any(each.choice.pieces for each in prepared(mask, torch.float32).values())


def test_they_end_with_their_block_however_it_ends():
    with pytest.raises(ZeroDivisionError), override(descriptors=False), override(pieces=False):
        assert (overrides().descriptors, overrides().pieces) == (False, False)
        raise ZeroDivisionError
    assert overrides() == Overrides()


def test_what_cannot_be_chosen_is_an_error():
    with pytest.raises(ValueError, match="warps"), override(warps=4):
        pass
