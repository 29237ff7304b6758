import pytest
import torch

from experiments.selection.limit import share_found


@pytest.mark.parametrize(
    ("dim", "block", "blocks", "chosen"), [(32, 64, 30, 6), (64, 16, 40, 8), (16, 16, 60, 4), (32, 1, 40, 2)]
)
def test_the_share_is_the_one_of_random_keys(dim, block, blocks, chosen):
    generator, trials = torch.Generator().manual_seed(0), 1500
    keys = torch.nn.functional.normalize(torch.randn(trials, blocks, block, dim, generator=generator), dim=-1)
    products = (keys.mean(2) @ keys[:, 0, 0, :, None]).squeeze(2)
    measured = ((products[:, 1:] > products[:, :1]).sum(1) < chosen).double().mean().item()
    assert share_found(dim, block, blocks, chosen) == pytest.approx(measured, abs=0.04)


def test_the_share_grows_with_features_and_choices_and_falls_with_the_block():
    base = share_found(64, 64, 240, 15)
    assert share_found(64, 64, 240, 30) > base < share_found(128, 64, 240, 15)
    assert share_found(64, 128, 240, 15) < base
    assert share_found(64, 64, 240, 15, cosine=0.0) == pytest.approx(15 / 240, abs=0.01)
    assert share_found(64, 64, 15, 15) == pytest.approx(1.0)
